#!/bin/sh
# Runs all tests: sh tests/run.sh PYTHON [options of pytest]. `make test` calls it after the linters.
#
# First the tests that run a backend in pytest's own process, one process a backend (TensorFlow has none); then all the rest, in which
# pytest itself imports no framework, in two processes. Tests that share worker processes are in one group
# (`xdist_group`), so that these are started once.
set -u
python=${1:-python3}
[ $# -gt 0 ] && shift
cd "$(dirname "$0")/.." || exit 2

TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2}
export TF_CPP_MIN_LOG_LEVEL
# What a shell has set must not reach the workers.
unset TF_CONFIG KERAS_BACKEND

summary=""
status=0

part() {
    name=$1
    shift
    start=$(date +%s)
    "$@"
    code=$?
    # 5: no test was collected, which is what a selection with -k may lead to.
    if [ $code -eq 0 ] || [ $code -eq 5 ]; then result=passed; else result=FAILED; status=1; fi
    summary="$summary
  $result  $name ($(($(date +%s) - start)) s)"
}

# They wait for processes most of the time, so they run beside each other; what they print comes one after the other.
output=$(mktemp -d)
trap 'rm -rf "$output"' EXIT
for backend in jax torch; do
    KERAS_BACKEND=$backend "$python" -m pytest "tests/backends/$backend" "$@" >"$output/$backend" 2>&1 &
    eval "pid_$backend=$!"
done
show() {
    eval "wait \$pid_$1"
    code=$?
    cat "$output/$1"
    return $code
}
part "tests/backends/jax" show jax
part "tests/backends/torch" show torch
part "the rest of tests" "$python" -m pytest tests --ignore=tests/backends -n 2 --dist loadgroup "$@"

printf '\nResults:%s\n' "$summary"
exit $status
