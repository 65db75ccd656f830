"""The metadata server of Google Cloud, which a similar server on this machine replaces."""

import contextlib
import http.server
import threading
import time

import pytest

from kdist.cluster.metadata_server import fetch_metadata
from kdist.cluster_resolver import TPUClusterResolver


@contextlib.contextmanager
def metadata_server(answer):
    """Runs a real server on this machine; `answer` returns the status, header and text for each request."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, self.headers.get("Metadata-Flavor")))
            status, flavor, text = answer(len(asked))
            self.send_response(status)
            self.send_header("Metadata-Flavor", flavor)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    asked = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield (
                {"GCE_METADATA_HOST": f"127.0.0.1:{server.server_port}", "http_proxy": "http://127.0.0.1:1"},
                asked,
            )
        finally:
            server.shutdown()


def test_the_metadata_server_is_asked():
    with metadata_server(lambda number: (200, "Google", "v2-8")) as (environ, asked):
        assert fetch_metadata("instance/attributes/accelerator-type", environ) == "v2-8"
    assert asked == [("/computeMetadata/v1/instance/attributes/accelerator-type", "Google")]
    with metadata_server(lambda number: (404, "Google", "not found")) as (environ, _):
        assert fetch_metadata("instance/attributes/tpu-env", environ) is None
    with metadata_server(lambda number: (503 if number == 1 else 200, "Google", "late")) as (environ, asked):
        assert fetch_metadata("x", environ) == "late" and len(asked) == 2


@pytest.mark.kills("cluster_other_metadata_server_believed")
@pytest.mark.parametrize(
    "answer", [(200, "AWS", "{}"), (404, "", ""), (401, "", ""), (500, "Google", "")], ids=str
)
def test_another_server_is_not_believed(answer):
    with (
        metadata_server(lambda number: answer) as (environ, _),
        pytest.raises(RuntimeError, match=r"(?s)metadata server.*TPU_WORKER_HOSTNAMES"),
    ):
        TPUClusterResolver(environ=environ)


@pytest.mark.kills("cluster_metadata_server_without_patience")
def test_no_metadata_server_and_one_that_hangs(monkeypatch):
    start = time.monotonic()
    with pytest.raises(ValueError, match="did not respond within 2 s"):
        TPUClusterResolver(environ={"GCE_METADATA_IP": "127.0.0.1:1"})
    waiting = threading.Event()
    with metadata_server(lambda number: waiting.wait(20) and (200, "Google", "")) as (environ, asked):
        with pytest.raises(RuntimeError, match=r"(?s)did not respond within 0.2 s.*timed out"):
            fetch_metadata("x", environ, timeout=0.2)
        waiting.set()
        assert len(asked) == 1
    assert time.monotonic() - start < 5
