"""The output of the command line for options and commands that do not exist."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from kdist.command_line import main


@pytest.mark.kills(
    unknown_option_before_the_command="[arguments9-kdist -unknown option: --verison-Did you mean --version?]"
)
@pytest.mark.parametrize(
    ("arguments", "usage", "message", "hint"),
    [
        (["run", "--num", "2", "x.py"], "kdist run ", "unknown option: --num", "Did you mean --num-workers?"),
        (["run", "--num_worker=2", "x.py"], "kdist run ", "unknown option: --num_worker", "--num-workers?"),
        (["launch", "--nnodes", "2", "x.py"], "kdist run ", "unknown option: --nnodes", "mean --hosts?"),
        (["run", "--node_rank", "0", "x.py"], "kdist run ", "unknown option: --node_rank", "--host-index?"),
        (["run", "--frobnicate", "x.py"], "kdist run ", "unknown option: --frobnicate", "kdist run --help"),
        (["run", "-x", "x.py"], "kdist run ", "unknown option: -x", "kdist run --help"),
        (["bench", "--step", "2"], "kdist bench ", "unknown option: --step", "Did you mean --steps?"),
        (["bench", "--backend", "jxa"], "kdist bench ", "invalid choice: 'jxa'", "Did you mean jax?"),
        (["info", "all"], "kdist info ", "unexpected argument: all", "kdist info --help"),
        (["--verison"], "kdist ", "unknown option: --verison", "Did you mean --version?"),
        (["rnu", "x.py"], "kdist ", "invalid choice: 'rnu'", "Did you mean run?"),
        (["manifest", "slrum"], "kdist manifest ", "invalid choice: 'slrum'", "Did you mean slurm?"),
        (
            ["manifest", "slurm", "-n", "2", "--gpu", "1", "x.py"],
            "kdist manifest slurm ",
            "unknown option: --gpu",
            "Did you mean --gpus?",
        ),
        (
            ["manifest", "slurm", "--num", "2", "x.py"],
            "kdist manifest slurm ",
            "required: -n/--num-workers",
            "Did you mean --num-workers instead of --num?",
        ),
    ],
)
def test_the_subcommand_suggests_the_nearest_option(arguments, usage, message, hint, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith(f"usage: {usage}")
    *_, said, suggested = err.splitlines()
    assert message in said and suggested.endswith(hint)


@pytest.mark.kills("kdist_alone_lists_no_commands")
@pytest.mark.parametrize(("arguments", "listed"), [([], "checkpoint"), (["checkpoint"], "convert")])
def test_without_a_command_the_help_lists_the_commands(arguments, listed, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and not out
    assert re.search(rf"^ +{listed} +\w", err, re.M) and "examples:" in err


@pytest.mark.kills("python_taken_as_the_script")
@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["run", "-n", "2", "python", "train it.py", "--epochs", "2"], "kdist run 'train it.py' --epochs 2"),
        (["run", sys.executable, "-m", "package.train"], "kdist run -m package.train"),
        (["run", "python3"], "kdist run train.py"),
        (["manifest", "slurm", "-n", "2", "python3.11", "x.py"], "kdist manifest slurm x.py"),
    ],
)
def test_python_is_not_the_script(arguments, hint, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err.endswith(f"Pass only the script: {hint}\n")


@pytest.mark.kills("nearest_backend_not_suggested")
@pytest.mark.parametrize(
    ("name", "nearest"), [("pytorch", "torch"), ("TF", "tensorflow"), ("jaxlib", "jax"), ("mlx", "jax")]
)
def test_an_unknown_backend_suggests_the_nearest(name, nearest, tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("")
    assert main(["run", "--backend", name, str(script)]) == 2
    assert f"kdist run --backend {nearest}, or export KERAS_BACKEND={nearest}\n" in capsys.readouterr().err


@pytest.mark.kills("command_line_shows_tracebacks_of_the_system")
def test_an_error_of_the_system_has_no_traceback(tmp_path, capsys):
    (tmp_path / "worker-0.jsonl").mkdir()
    assert main(["plot", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert re.fullmatch(r"kdist plot: The operating system reports an error: .*Is a directory: .*\n", err)


def test_the_script_may_have_any_options(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("")
    assert main(["run", "-n", "1", "--dry-run", str(script), "--num", "2", "-x", "--nnodes"]) == 0
    assert f"{script} --num 2 -x --nnodes\n" in capsys.readouterr().out


@pytest.mark.kills("options_after_the_script_not_warned_about")
@pytest.mark.parametrize("option", ["-n 2", "--num-workers=2", "--nproc-per-node 2"])
def test_workers_that_the_script_gets_are_warned_about(option, tmp_path, capsys, caplog):
    script = tmp_path / "train.py"
    script.write_text("")
    assert main(["run", "--dry-run", str(script), *option.split(), "--epochs=1"]) == 0
    out, err = capsys.readouterr()
    assert f"{script} {option} --epochs=1\n" in out and f"kdist run {option} {script}" in err + caplog.text


def test_an_option_that_the_help_does_not_list_is_accepted_and_not_suggested(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("")
    assert main(["run", "--nproc_per_node", "2", "--dry-run", str(script)]) == 0
    with pytest.raises(SystemExit):
        main(["run", "--nproc_per_nod", "2", str(script)])
    assert "Did you mean --nproc-per-node?" in capsys.readouterr().err


@pytest.mark.kills("pipe_of_head_is_a_traceback")
def test_a_reader_that_has_read_enough_is_not_an_error():
    command = [sys.executable, "-m", "kdist", "info"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 1 and not said, said
