"""`kdist manifest kubernetes` prints valid manifests with the requested settings."""

import kubernetes_validate
import pytest
import yaml

from kdist.cluster import discover

BASE = ["-n", "4", "--image", "registry/train:1"]
EVERYTHING = [
    *BASE, "--name", "big", "--namespace", "team", "--backend", "jax", "--cpus", "8", "--gpus", "2", "--memory", "16G",
    "--time", "1-02:03:04", "--max-restarts", "5", "--grace-period", "300", "--checkpoint-dir", "/data/here", "--port",
    "3333", "--storage", "1Ti", "--storage-class", "nfs", "--shared-memory", "8Gi", "--env", "A=$(KERAS_BACKEND): é #",
    "-m", "package.train", "--flag", "$(A) 'b'", "$$(A) $",
]  # fmt: skip


@pytest.fixture
def objects(manifest):
    """Returns a function that parses a manifest into a dictionary from kinds to objects."""

    def write(*options):
        found = list(yaml.safe_load_all(manifest("kubernetes", *options)))
        return {one["kind"]: one for one in found}

    return write


def pod_of(objects):
    return objects["Job"]["spec"]["template"]["spec"]


def environment_of(objects):
    """Returns the environment of a pod's container, without the variables that Kubernetes looks up."""
    (container,) = pod_of(objects)["containers"]
    return {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}


# 1.29 is the first version that reads the rules of a Job by default; the other version is the newest.
@pytest.mark.parametrize("version", ["1.29", kubernetes_validate.latest_version()])
@pytest.mark.parametrize(
    "options",
    [
        [*BASE, "train.py"],
        [*BASE, "--claim", "ours", "train.py"],
        [*BASE, "--max-restarts", "0", "train.py"],
        EVERYTHING,
    ],
    ids=["few", "claim", "no_restarts", "everything"],
)
def test_the_schema_of_kubernetes(objects, options, version):
    for one in objects(*options).values():
        kubernetes_validate.validate(one, version, strict=True)


def test_the_schema_notices():
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {}, "spec": {"template": {}, "completion": 2}}
    with pytest.raises(kubernetes_validate.ValidationError, match="completion"):
        kubernetes_validate.validate(job, "1.29", strict=True)


@pytest.mark.kills("manifest_pods_not_found")
def test_a_pod_for_each_worker_that_the_others_find(objects):
    found = objects(*BASE, "train.py")
    job, service = found["Job"]["spec"], found["Service"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 4, 4)
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"job-name": found["Job"]["metadata"]["name"]}
    assert pod_of(found)["subdomain"] == service["metadata"]["name"]
    told = environment_of(found)
    assert told["KDIST_NUM_WORKERS"] == "4" and told["KDIST_COORDINATOR_ADDRESS"] == "train-0.train:2222"
    assert float(told["KDIST_JOIN_TIMEOUT"]) > 600, (
        "as long as Kubernetes may wait before it starts a pod again"
    )


@pytest.mark.parametrize("number", [1, 3])
def test_the_workers_find_their_cluster(objects, number):
    told = environment_of(
        objects("-n", str(number), "--image", "train", "--name", "big", "--port", "3333", "train.py")
    )
    for index in range(number):
        cluster = discover(environ=told | {"JOB_COMPLETION_INDEX": str(index)})
        assert (cluster.worker_index, cluster.num_workers) == (index, number)
        assert cluster.coordinator == ("big-0.big:3333" if number > 1 else None)


@pytest.mark.kills("manifest_preemption_counted")
def test_a_failure_counts_once_a_worker_and_a_preemption_does_not(objects):
    found = objects(*BASE, "--max-restarts", "2", "train.py")
    job = found["Job"]["spec"]
    assert job["backoffLimitPerIndex"] == 2 and job["maxFailedIndexes"] == 0 and "backoffLimit" not in job
    assert pod_of(found)["restartPolicy"] == "Never", "else the rules are refused"
    (container,) = pod_of(found)["containers"]
    actions = {}
    for rule in job["podFailurePolicy"]["rules"]:
        if "onExitCodes" in rule:
            assert rule["onExitCodes"]["containerName"] == container["name"]
            assert rule["onExitCodes"]["operator"] == "In"
        condition = rule.get("onPodConditions", [{}])[0].get("type")
        actions[condition or rule["onExitCodes"]["values"][0]] = rule["action"]
    assert actions == {2: "FailJob", 75: "Ignore", "DisruptionTarget": "Ignore"}


def test_without_restarts_a_preempted_job_ends(objects):
    job = objects(*BASE, "--max-restarts", "0", "train.py")["Job"]["spec"]
    assert job["backoffLimitPerIndex"] == 0
    assert [rule["action"] for rule in job["podFailurePolicy"]["rules"]] == ["FailJob"]


def test_the_workers_share_the_checkpoints(objects):
    found = objects(*EVERYTHING)
    claim = found["PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"] and claim["spec"]["storageClassName"] == "nfs"
    assert claim["spec"]["resources"]["requests"]["storage"] == "1Ti"
    volumes = {volume["name"]: volume for volume in pod_of(found)["volumes"]}
    (container,) = pod_of(found)["containers"]
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/data/here"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert mounts["/dev/shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert environment_of(found)["CHECKPOINT_DIR"] == "/data/here"
    ours = objects(*BASE, "--claim", "ours", "train.py")
    assert "PersistentVolumeClaim" not in ours
    assert pod_of(ours)["volumes"][0]["persistentVolumeClaim"]["claimName"] == "ours"


@pytest.mark.kills("manifest_two_dollars_become_one")
def test_what_a_worker_gets(objects):
    found = objects(*EVERYTHING)
    (container,) = pod_of(found)["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "8", "memory": "16384Mi"}, "limits": {"memory": "16384Mi", "nvidia.com/gpu": "2"}
    }  # fmt: skip
    assert container["command"] == ["python", "-m", "package.train", "--flag", "$$(A) 'b'", "$$$$(A) $$"]
    told = environment_of(found)
    assert told["A"] == "$$(KERAS_BACKEND): é #", "Kubernetes makes one $ of two, and looks for no variable"
    assert told["KERAS_BACKEND"] == "jax" and told["OMP_NUM_THREADS"] == "8"
    assert told["KDIST_COORDINATOR_ADDRESS"] == "big-0.big:3333"
    assert pod_of(found)["terminationGracePeriodSeconds"] == 300
    assert found["Job"]["spec"]["activeDeadlineSeconds"] == ((24 + 2) * 60 + 3) * 60 + 4
    assert {one["metadata"]["namespace"] for one in found.values()} == {"team"}
    assert "resources" not in pod_of(objects(*BASE, "train.py"))["containers"][0]


def token_of(objects):
    """Returns the workers' secret, which it finds through the reference in their environment."""
    (container,) = pod_of(objects)["containers"]
    (entry,) = [entry for entry in container["env"] if entry["name"] == "KDIST_CLUSTER_TOKEN"]
    reference = entry["valueFrom"]["secretKeyRef"]
    assert reference["name"] == objects["Secret"]["metadata"]["name"] and "value" not in entry
    return objects["Secret"]["stringData"][reference["key"]]


@pytest.mark.kills("manifest_secret_in_the_pod")
def test_the_workers_share_a_secret(objects, manifest):
    tokens = {token_of(objects(*BASE, "train.py")) for _ in range(2)}
    assert len(tokens) == 2 and all(len(bytes.fromhex(token)) == 16 for token in tokens), "one per job"
    own = ["--env", "KDIST_CLUSTER_TOKEN=mine 7"]
    assert token_of(objects(*BASE, *own, "train.py")) == "mine 7"
    assert manifest("kubernetes", *BASE, *own, "train.py").count("mine 7") == 1


def test_pods_have_no_rights_that_they_do_not_need(objects):
    pod = pod_of(objects(*BASE, "train.py"))
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] == 1000
    assert pod["securityContext"]["fsGroup"] == 1000, "the user may write to the volume"
    assert pod["containers"][0]["securityContext"]["allowPrivilegeEscalation"] is False
    root = pod_of(objects(*BASE, "--user", "0", "train.py"))["securityContext"]
    assert root["runAsUser"] == 0 and root["runAsNonRoot"] is False


def test_a_variable_of_the_user_wins(objects):
    (container,) = pod_of(
        objects(*BASE, "--env", "KDIST_RESTART=7", "--env", "KDIST_JOIN_TIMEOUT=9", "train.py")
    )["containers"]
    told = [(entry["name"], entry.get("value")) for entry in container["env"]]
    assert ("KDIST_RESTART", "7") in told and ("KDIST_JOIN_TIMEOUT", "9") in told
    assert len({name for name, _ in told}) == len(told)
