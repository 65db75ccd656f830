"""`kdist manifest`: its options, and wrong options."""

import stat

import pytest

from kdist.command_line import main

KUBERNETES = ["kubernetes", "--image", "registry/train:1"]


@pytest.mark.parametrize("scheduler", [KUBERNETES, ["slurm"]], ids=["kubernetes", "slurm"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-n", "0", "train.py"], "--num-workers is not a whole number"),
        (["-n", "auto", "train.py"], "--num-workers is not a whole number"),
        (["-n", "2"], "The script to run is missing"),
        (["-n", "2", "--", "-x"], "The script to run is missing"),
        (["-n", "2", "--backend", "numpy", "train.py"], "Choose one of tensorflow, jax, torch"),
        (["-n", "2", "--name", "Train", "train.py"], "not a valid name for a job"),
        (["-n", "2", "--name", "t" * 53, "train.py"], "not a valid name for a job"),
        (["-n", "2", "--gpus", "-1", "train.py"], "--gpus is not"),
        (["-n", "2", "--cpus", "0.5", "train.py"], "--cpus is not"),
        (["-n", "2", "--memory", "16", "train.py"], "--memory is not"),
        (["-n", "2", "--time", "90", "train.py"], "--time is not a positive time"),
        (["-n", "2", "--time", "00:00:00", "train.py"], "--time is not a positive time"),
        (["-n", "2", "--max-restarts", "-1", "train.py"], "--max-restarts is not"),
        (["-n", "2", "--env", "NAME", "train.py"], "--env does not have the form"),
        (["-n", "2", "--env", "1A=b", "train.py"], "--env does not have the form"),
        (["-n", "2", "--checkpoint-dir", "a\nb", "train.py"], "--checkpoint-dir is not a path"),
        (["-n", "2", "--output", "/nowhere/job", "train.py"], "cannot write the manifest"),
    ],
)
def test_wrong_calls(scheduler, options, message, capfd):
    assert main(["manifest", *scheduler, *options]) == 2
    captured = capfd.readouterr()
    assert message in captured.err and "Traceback" not in captured.err and not captured.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([*KUBERNETES, "--port", "0"], "--port"),
        ([*KUBERNETES, "--checkpoint-dir", "here"], "not an absolute path"),
        ([*KUBERNETES, "--claim", "A"], "--claim is not a Kubernetes name"),
        ([*KUBERNETES, "--namespace", "a b"], "--namespace is not a Kubernetes name"),
        ([*KUBERNETES, "--storage", "much"], "--storage is not a Kubernetes quantity"),
        (["kubernetes", "--image", "a b"], "--image is not the name"),
        (["slurm", "--partition", "a\n#SBATCH --b"], "--partition is not a Slurm name"),
        (["slurm", "--nodes", "x"], "--nodes is not"),
    ],
)
def test_wrong_calls_of_one(options, message, capfd):
    assert main(["manifest", *options, "-n", "2", "train.py"]) == 2
    assert message in capfd.readouterr().err


def test_options_that_are_missing(capfd):
    for options in (["slurm", "train.py"], ["kubernetes", "-n", "2", "train.py"], ["nomad"], []):
        with pytest.raises(SystemExit) as info:
            main(["manifest", *options])
        assert info.value.code == 2


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (["train.py"], "train"),
        (["my_Code/01 Train_it.v2.py"], "train-it-v2"),
        (["-m", "package.train"], "package-train"),
        (["--", "7.py"], "job"),
        (["数.py"], "job"),
        (["a" * 51 + "_b.py"], "a" * 51),
    ],
)
def test_the_name_of_a_job_comes_from_the_script(manifest, target, name):
    assert f"#SBATCH --job-name={name}\n" in manifest("slurm", "-n", "2", *target)


def test_output_goes_to_a_file(manifest, tmp_path):
    for options in ([*KUBERNETES, "--env", "KDIST_CLUSTER_TOKEN=a"], ["slurm"]):
        printed = manifest(*options, "-n", "2", "train.py")
        assert manifest(*options, "-n", "2", "--output", str(tmp_path / "job"), "train.py") == ""
        assert (tmp_path / "job").read_text() == printed
        assert stat.S_IMODE((tmp_path / "job").stat().st_mode) == 0o600, "it may contain a secret"
