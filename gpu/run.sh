#!/usr/bin/env bash
# Runs the bundle of `cargo xtask gpu-test` on a machine with a GPU: tests, the sanitizer and
# benchmarks.
#
#   gpu/run.sh [tests] [sanitizer] [bench] [driven] [upstream]   all but upstream by default
#
# It needs the bundle and the CUDA driver. The bundle is the script's own directory, target/gpu of
# its checkout, or BUNDLE. Some parts need compute-sanitizer, nvidia-cuda-mps-control and Python
# with torch. Results go to OUT (default: the current directory).
set -uo pipefail

beside=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
here=$(dirname "$beside")
# The script is in the bundle, or in the checkout that the bundle was built from.
[ -x "$beside/gpu-tests" ] && bundle=$beside || bundle=${BUNDLE:-$here/target/gpu}
out=${OUT:-.}
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(tests sanitizer driven bench)
failed=0

has() { [[ " ${parts[*]} " == *" $1 "* ]]; }
say() { printf '\n=== %s\n' "$*"; }

if has tests; then
    # Without MPS: under MPS a killed client can take other clients with it.
    say "tests"
    # Tests that need a GPU are ignored elsewhere. Some have further requirements.
    which=(--ignored --skip owner)
    if [ "$(nvidia-smi --list-gpus 2> /dev/null | wc -l)" -lt 2 ]; then
        which+=(--skip memories_of_two_gpus)
        echo "ignored: memories_of_two_gpus needs two GPUs"
    fi
    if [ -z "${PEERWAY_NVRTC_SO:-}" ] && ! ldconfig -p | grep -q 'libnvrtc\.so'; then
        which+=(--skip a_kernel_that_is_compiled_now)
        echo "ignored: a_kernel_that_is_compiled_now needs NVRTC (PEERWAY_NVRTC_SO)"
    fi
    for tests in gpu copier driven; do
        timeout 240 "$bundle/$tests-tests" "${which[@]}" --test-threads=1 2>&1 | tee "$out/$tests-tests.txt" | grep -vE '^$|^note:|^stack' | tail -25
        [ "${PIPESTATUS[0]}" -eq 0 ] || failed=1
    done
fi

if has sanitizer && command -v compute-sanitizer > /dev/null; then
    say "compute-sanitizer"
    for tool in memcheck initcheck; do
        # The tests try a fabric and the driver refuses it, which is not an error.
        timeout 300 compute-sanitizer --tool "$tool" --report-api-errors no --target-processes all --error-exitcode 9 \
            "$bundle/gpu-tests" --ignored --test-threads=1 every_shape another_process > "$out/sanitizer-$tool.txt" 2>&1
        status=$?
        timeout 300 compute-sanitizer --tool "$tool" --report-api-errors no --error-exitcode 9 \
            "$bundle/driven-tests" --ignored --test-threads=1 a_kernel_puts puts_between each_count >> "$out/sanitizer-$tool.txt" 2>&1
        status=$((status + $?))
        echo "$tool: exit $status; $(grep -h 'ERROR SUMMARY' "$out/sanitizer-$tool.txt" | sort | uniq -c | tr '\n' ';')"
        [ $status -eq 0 ] || failed=1
    done
fi

mps() {
    [ -z "${CUDA_MPS_PIPE_DIRECTORY:-}" ] || return 0
    # Without MPS, the GPU serves the contexts of two processes in turns of milliseconds, so
    # latencies cannot be measured.
    export CUDA_MPS_PIPE_DIRECTORY=/tmp/peerway-mps CUDA_MPS_LOG_DIRECTORY=/tmp/peerway-mps-log
    mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
    nvidia-cuda-mps-control -d && trap 'echo quit | nvidia-cuda-mps-control' EXIT
}

if has driven; then
    # One process first: MPS only slows down its start.
    say "bench gpu-local"
    "$bundle/peerway" bench gpu-local --json "$out/gpu-local.json" || failed=1
    mps
    for copier in launched resident; do
        say "bench gpu-remote --copier $copier"
        "$bundle/peerway" bench gpu-remote --copier "$copier" --json "$out/gpu-remote-$copier.json" || failed=1
    done
fi

if has bench; then
    mps
    for memory in gpu pinned,gpu gpu,host; do
        say "bench --full --memory $memory"
        "$bundle/peerway" bench --full --memory "$memory" --json "$out/bench-${memory/,/-}.json" || failed=1
    done
    say "bench --memory-kinds"
    "$bundle/peerway" bench --memory-kinds --json "$out/kinds.json" || failed=1
    say "bench peer-copy"
    "$bundle/peerway" bench peer-copy --json "$out/peer-copy.json" || failed=1
    say "doctor"
    "$bundle/peerway" doctor | sed -n '/GPU/,/^$/p'
fi

if has upstream; then
    say "upstream's programs (PEERWAY_UPSTREAM is a checkout of uccl)"
    packages=$(mktemp -d)
    python3 -m pip install --quiet --no-index --no-deps --target "$packages" "$bundle"/*.whl
    PYTHONPATH=$packages python3 -m pytest -q "$here/python/tests/uccl/test_upstream.py" || failed=1
fi

exit $failed
