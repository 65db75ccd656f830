"""Workers with IPv6 addresses, which come from `TF_CONFIG` or from `kdist run --hosts`."""

from __future__ import annotations

import socket

import pytest

from kdist.cluster import free_ports
from tests.helpers.processes import each_backend, each_backend_in_twelve_turns
from tests.helpers.same_numbers import SCRIPT, check_numbers
from tests.helpers.scripts import RUN, Script, environments_of, started


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        return True
    except OSError:
        return False


pytestmark = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback address, ::1")


@pytest.mark.kills(ipv6_chief_listens_on_ipv4="[torch]")
@each_backend
def test_workers_with_ipv6_addresses_train_as_one_device(backend, tmp_path):
    addresses = [f"[::1]:{port}" for port in free_ports(2, "::1")]
    with started(tmp_path, SCRIPT, environments_of(backend, addresses)) as scripts:
        check_numbers(backend, 2, scripts)


@each_backend_in_twelve_turns
def test_kdist_run_with_ipv6_hosts(backend, tmp_path):
    hosts = ",".join(f"[::1]:{port}" for port in free_ports(2, "::1"))
    command = (*RUN, "--backend", backend, "-n", "1", "--hosts", hosts, "--host-index")
    with (
        Script(tmp_path, "host0", SCRIPT, {}, (*command, "0")) as first,
        Script(tmp_path, "host1", SCRIPT, {}, (*command, "1")) as second,
    ):
        check_numbers(backend, 2, [first, second])
