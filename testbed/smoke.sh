#!/usr/bin/env bash
#
# smoke.sh: checks the guest of rdma-vm.sh.  It runs in the guest and checks that
# four devices are up, that perftest writes cross both wires, and that one wire
# works while the other is cut.

set -euo pipefail

log=$(mktemp)
fail() { echo "smoke: $*" >&2; cat "$log" >&2; exit 1; }

# state DEVICE: the state that "rdma link" reports
state() { rdma link show "$1/1" | sed -n 's/.* state \([A-Z]*\).*/\1/p'; }

# becomes DEVICE is|not: waits until the device is ACTIVE, or until it is not
becomes() {
    local n now
    for n in $(seq 100); do
        now=$(state "$1")
        if [ "$2" = is ] && [ "$now" = ACTIVE ]; then return; fi
        if [ "$2" = not ] && [ "$now" != ACTIVE ]; then return; fi
        sleep 0.1
    done
    rdma link >"$log"
    fail "$1 is still $now"
}

sent() { cat "/sys/class/net/$1/statistics/tx_bytes"; }

size=65536 writes=50 port=18515
# writes_cross FROM TO LINK ADDRESS: writes with perftest and counts the bytes on the link
writes_cross() {
    local options before server n
    port=$((port + 1))
    options=(-F -x 1 -s "$size" -n "$writes" -p "$port")
    before=$(sent "$3")
    : >"$log"
    timeout 60 ib_write_bw -d "$2" "${options[@]}" >>"$log" 2>&1 &
    server=$!
    for n in $(seq 100); do
        [ -z "$(ss -Hltn "sport = :$port")" ] || break
        sleep 0.1
    done
    timeout 60 ib_write_bw -d "$1" "${options[@]}" "$4" >>"$log" 2>&1 || fail "ib_write_bw $1 -> $2"
    wait "$server" || fail "ib_write_bw $1 -> $2: the server failed"
    [ $(($(sent "$3") - before)) -ge $((size * writes)) ] || fail "the bytes $1 -> $2 did not cross $3"
    echo "smoke: ib_write_bw $1 -> $2 over $3, $writes x $size B: $(average) MB/s"
}
average() { awk -v size="$size" '$1 == size { found = $4 } END { print found }' "$log"; }

for device in rxe0 rxe1 rxe2 rxe3; do becomes "$device" is; done
rdma link
writes_cross rxe0 rxe1 va0 10.77.0.2
writes_cross rxe2 rxe3 va1 10.78.0.2

ip link set va1 down
becomes rxe2 not
if ping -c 1 -W 1 10.78.0.2 >/dev/null 2>&1; then fail 'va1 is down, but 10.78.0.2 still answers'; fi
echo "smoke: va1 down: rxe2 $(state rxe2), rxe3 $(state rxe3)"
writes_cross rxe0 rxe1 va0 10.77.0.2

ip link set va1 up
becomes rxe2 is
becomes rxe3 is
for n in $(seq 100); do
    if ip route get 10.78.0.2 >/dev/null 2>&1 && ip route get 10.78.0.1 >/dev/null 2>&1; then break; fi
    sleep 0.1
done
echo 'smoke: va1 is up again'
writes_cross rxe2 rxe3 va1 10.78.0.2
