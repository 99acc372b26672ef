#!/usr/bin/env bash
# test_lab.sh - the lab of slow links, scripts/lab.sh and dev/wire.c: that rates, delays and losses are those asked for, that the bytes on
# the links are compared with a ledger, that mistakes are one line, and that nothing is left behind, whatever ends it.
# Ends with "N passed, N failed"; exit code 1 if any row failed. Where namespaces are not permitted only the refusal is tested.
# shellcheck disable=SC2016,SC2317  # conditions of rows are evaluated later
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
lab=$PWD/scripts/lab.sh
export LAB_NAME=labtest # apart from a lab that someone is using
work=$(mktemp -d)
finish() {
    [ ! -e "$work/ours" ] || bash "$lab" down > /dev/null 2>&1
    rm -rf "$work"
}
trap finish EXIT
trap 'exit 130' INT TERM
passed=0 failed=0 rc=0

row() { # name, then conditions as commands in text: all must hold
    local name=$1 condition wrong=""
    shift
    for condition in "$@"; do
        eval "$condition" > "$work/said" 2>&1 || { wrong=$condition && break; }
    done
    if [ -z "$wrong" ]; then
        passed=$((passed + 1))
        echo "ok    $name"
    else
        failed=$((failed + 1))
        echo "FAIL  $name: $wrong (exit code $rc)"
        tail -n 12 "$work/said" "$work/out" "$work/err" | sed 's/^/      /'
    fi
}
skip() { echo "skip  $1"; }
close_down() {
    echo "$passed passed, $failed failed"
    [ $failed -eq 0 ]
    exit
}
lab() { rc=0 && timeout -k 5 60 bash "$lab" "$@" > "$work/out" 2> "$work/err" < /dev/null || rc=$?; }
one_line() { [ "$rc" -eq 1 ] && [ "$(wc -l < "$work/err")" -eq 1 ] && grep -q "^error: .*$1" "$work/err" && [ ! -s "$work/out" ]; }
clean() {
    ! ip netns list | grep labtest && [ ! -e /run/lab-labtest ] && ! pgrep -f '/run/lab-labtest|labtest-keeper' &&
        ! find /sys/fs/cgroup -maxdepth 3 -name 'labtest*' | grep .
}
between() { awk -v x="$1" -v low="$2" -v high="$3" 'BEGIN { print x, "expected", low, "to", high; exit !(x >= low && x <= high) }'; }
until_true() { # seconds command...: in a moment, or never
    local left=$(($1 * 20))
    shift
    while ! "$@" > /dev/null 2>&1; do
        left=$((left - 1))
        [ $left -gt 0 ] || return 1
        sleep 0.05
    done
}

# ---- where it cannot be

if command -v setpriv > /dev/null && [ "$EUID" -eq 0 ]; then
    open_place=$(TMPDIR=/tmp mktemp -d) # $work may lie where nobody else may look
    cp "$lab" "$open_place/lab.sh"
    chmod 755 "$open_place" "$open_place/lab.sh"
    rc=0
    setpriv --reuid 65534 --regid 65534 --clear-groups bash "$open_place/lab.sh" up 2 > "$work/out" 2> "$work/err" || rc=$?
    row "without root: one line" 'one_line "needs root"'
    rm -rf "$open_place"
fi
lab up 2
if [ $rc -ne 0 ]; then
    if [ -e /run/lab-labtest ]; then
        row "a lab that is up already: one line names its holder" 'one_line "held by process"'
        skip "all else, since a lab is up"
    else
        row "without the rights or tools: one line" 'one_line .'
        skip "all else: $(head -n 1 "$work/err")"
    fi
    close_down
fi
touch "$work/ours"
row "up: two hosts" '[ "$(ip netns list | grep -c "^labtest[0-9]")" -eq 2 ]' 'grep -q "^labtest1  10.78.0.2  no rate limit" "$work/out"'
lab up 3
row "a second lab: one line names the holder" 'one_line "held by process [0-9]*, the keeper of lab.sh up 2, since"'
lab with 3 -- 2 true
row "and so for with" 'one_line "held by process"'
lab on 1 hostname
row "on: a command under the host's name" '[ "$(cat "$work/out")" = labtest1 ]'
lab on 0 cat /proc/net/dev
row "a host sees its own devices alone" '[ "$(sed -n "s/:.*//p" "$work/out" | xargs)" = "lo ctl data" ]'
lab counters
row "counters: a table" '[ "$(head -n 1 "$work/out")" = "$(printf "host\tbytes_sent\tpackets_sent\tbytes_received\tpackets_received")" ]' \
    '[ "$(wc -l < "$work/out")" -eq 3 ]' 'grep -qE "^labtest1(	[0-9]+){4}$" "$work/out"'
lab down
row "down leaves nothing" '[ $rc -eq 0 ]' clean
rc=0 && LAB_NAME=Lab/1 bash "$lab" status > "$work/out" 2> "$work/err" || rc=$?
row "refused: a name that is none" 'one_line "small letters"'
lab down
row "down twice is no mistake" '[ $rc -eq 0 ]' 'grep -q "nothing is up" "$work/err"'

# ---- mistakes

# shellcheck disable=SC2034  # used in a condition
while IFS='|' read -r expected words; do
    # shellcheck disable=SC2086  # one word each
    lab $words
    row "refused: lab.sh $words" 'one_line "$expected"' clean
done << 'MISTAKES'
expected up, with|sideways
number of hosts|up
hosts 1: expected 2 to 64|up 1
hosts x|up x
expected --rate|up 2 --speed 5
needs a value|up 2 --rate
expected a number with kbit|up 2 --rate 100
10kbit to 100gbit|up 2 --rate 1kbit
0 to 2000 ms|up 2 --delay -1
0 to 2000 ms|up 2 --delay 3000
0% to 50%|up 2 --loss 0.7
--host needs|up 2 --host 1
host 2: expected 0 to 1|up 2 --host 2 rate=1mbit
expected rate=|up 2 --host 1 speed=1
of one core|up 2 --host 1 cpu=1%
up takes no command|up 2 -- 2 true
with needs a command|with 2
number of ranks|with 2 -- 2
ranks 0|with 2 -- 0 true
no lab is up|run 2 true
no lab is up|on 0 true
no lab is up|rate 1mbit
no lab is up|counters
no lab is up|check 5
MISTAKES

# ---- rates, delays, losses, processor

# Mbit/s from host $1 to host $2, with $3 bytes.
speed() {
    bash "$lab" on "$2" iperf3 -s -1 > /dev/null 2>&1 &
    sleep 0.25
    bash "$lab" on "$1" iperf3 -J -n "$3" -c "10.78.0.$(($2 + 1))" > "$work/speed"
    awk -F'[:,]' '/"sum_received"/ { on = 1 } on && /bits_per_second/ { printf "%.1f\n", $2 / 1e6; exit }' "$work/speed"
}
# ms until a host says that a port is closed: there and back; the least of five, since this machine has other things to do
echo_ms() {
    bash "$lab" on "$1" bash -c 'for _ in 1 2 3 4 5; do t=$EPOCHREALTIME; (exec 3<> "/dev/tcp/$0/9") 2> /dev/null; echo "$t $EPOCHREALTIME"; done' \
        "10.78.0.$(($2 + 1))" | awk '{ t = ($2 - $1) * 1000; if (NR == 1 || t < least) least = t } END { printf "%.2f\n", least }'
}

lab up 3 --rate 50mbit --host 2 rate=10mbit
if command -v iperf3 > /dev/null; then
    row "rate: 50 Mbit/s" 'between "$(speed 0 1 4M)" 43 50'
    row "rate: to a slow host 10 Mbit/s" 'between "$(speed 0 2 800K)" 8 10.2'
    row "rate: from a slow host 10 Mbit/s" 'between "$(speed 2 1 800K)" 8 10.2'
    lab rate 20mbit 1
    row "rate changes while it is up" 'grep -q "labtest1 .* 20 Mbit/s" "$work/out"' 'between "$(speed 0 1 1600K)" 17 20.2'
else
    skip "rates in megabits: no iperf3 here"
fi
lab down
if [ -c /dev/net/tun ] && command -v "${CC:-cc}" > /dev/null; then
    "${CC:-cc}" -std=gnu11 -O2 -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion dev/wire.c -o "$work/wire" > "$work/err" 2>&1
    row "wire.c: no warnings" '[ ! -s "$work/err" ]' '[ -x "$work/wire" ]'
    printf 'a 10.0.0.1 0 0 0\n' > "$work/table"
    row "wire: refuses a table of one host" '! "$work/wire" "$work/table" data 2> "$work/err"' 'grep -q "expected at least 2 hosts" "$work/err"'
    printf 'a 10.0.0.1 0 0 0\nb 10.0.0.2 0 nan 0\n' > "$work/table"
    row "wire: refuses a delay that is no number" '! "$work/wire" "$work/table" data 2> "$work/err"' 'grep -q ":2: delay nan: expected" "$work/err"'
    printf 'labtest-none 10.0.0.1 0 0 0\nb 10.0.0.2 0 0 0\n' > "$work/table"
    row "wire: refuses a host that is not there" '! "$work/wire" "$work/table" data 2> "$work/err"' '[ "$(wc -l < "$work/err")" -eq 1 ]'
    lab up 3 --rate 50mbit --delay 15 --host 1 delay=45,rate=20mbit
    row "delay: 15 ms one way" 'between "$(echo_ms 0 2)" 30 36'
    row "delay: one host is farther" 'between "$(echo_ms 0 1)" 60 66' 'between "$(echo_ms 1 2)" 60 66'
    if command -v iperf3 > /dev/null; then row "rate through the relay: 50 Mbit/s" 'between "$(speed 0 2 5M)" 30 50'; fi
    lab rate none
    lab down
    row "the relay ends, and nothing is left" '[ $rc -eq 0 ]' clean 'grep -q "relay: labtest2: [1-9][0-9]* packets sent" "$work/err"'
else
    skip "delay and loss: no /dev/net/tun or no C compiler here"
fi
lab up 2 --host 1 cpu=40%
if grep -q "no CPU quota" "$work/err"; then
    skip "cpu=40%: no CPU quota is permitted here"
else
    lab on 1 bash -c 'timeout 1 bash -c "while :; do :; done"; times'
    sed -n '$s/0m\(.*\)s 0m.*/\1/p' "$work/out" > "$work/used"
    row "cpu=40%: at most two fifths of a second in one" 'between "$(cat "$work/used")" 0.1 0.45'
fi
lab down
row "and its control group goes" clean

# ---- ranks

mpirun=""
for program in mpirun mpirun.openmpi; do
    [ -n "$mpirun" ] || ! $program --version 2> /dev/null | grep -q 'Open MPI' || mpirun=$program
done
if [ -z "$mpirun" ] || ! command -v mpicc > /dev/null; then
    skip "ranks: no Open MPI here"
    close_down
fi
cat > "$work/ring.c" << 'RING'
// Every rank hands so many bytes to the next one; rank 0 prints what a ledger would say.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int main(int count, char** words) {
    enum { PIECE = 60000 };
    static char out[PIECE], in[PIECE], mine[64], all[64 * 64];
    long sent[2] = {0, 0}, table[2 * 64], bytes = count > 1 ? atol(words[1]) : 0;
    int rank, size;
    MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    gethostname(mine, sizeof(mine));
    MPI_Allgather(mine, 64, MPI_CHAR, all, 64, MPI_CHAR, MPI_COMM_WORLD);
    int next = (rank + 1) % size, last = (rank + size - 1) % size;
    double start = MPI_Wtime();
    for (long left = bytes; left > 0; left -= PIECE) {
        int n = left < PIECE ? (int)left : PIECE;
        MPI_Sendrecv(out, n, MPI_CHAR, next, 0, in, n, MPI_CHAR, last, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        sent[strcmp(all + 64 * next, mine) != 0] += n;
    }
    MPI_Barrier(MPI_COMM_WORLD);
    double seconds = MPI_Wtime() - start;
    MPI_Gather(sent, 2, MPI_LONG, table, 2, MPI_LONG, 0, MPI_COMM_WORLD);
    if (rank == 0) { printf("megabits a second: %.1f\n", 8e-6 * (double)bytes / seconds); }
    for (int r = 0; rank == 0 && r < size && bytes > 0; r++) {
        printf("network, rank %d: %ld bytes sent (gradient %ld, weights 0, norm 0, loader 0, control 0), %ld inside nodes, %ld between\n", r,
               table[2 * r] + table[2 * r + 1], table[2 * r] + table[2 * r + 1], table[2 * r], table[2 * r + 1]);
    }
    MPI_Finalize();
    return count > 2 ? atoi(words[2]) : 0;
}
RING
mpicc -O1 "$work/ring.c" -o "$work/ring" || exit 1

lab up 4 --rate 40mbit
lab run 4 hostname
row "run: one rank on each host" '[ $rc -eq 0 ]' '[ "$(sort "$work/out" | xargs)" = "labtest0 labtest1 labtest2 labtest3" ]'
lab run 6 hostname
row "run: more ranks than hosts" '[ "$(sort "$work/out" | xargs)" = "labtest0 labtest0 labtest1 labtest1 labtest2 labtest3" ]'
lab run 2 hostname
row "run: fewer ranks than hosts" '[ "$(sort "$work/out" | xargs)" = "labtest0 labtest1" ]'
lab run 4 "$work/ring" 2000000
row "run: the ranks talk over the slow links" '[ $rc -eq 0 ]' 'between "$(sed -n "s/megabits a second: //p" "$work/out")" 20 39'
row "run: the bytes on the links are those of the ledger" 'grep -q "^check passed" "$work/out"' \
    '[ "$(grep -c "^labtest[0-3]: ledger 2000000 bytes, sent 2[01][0-9]\{5\} in" "$work/out")" -eq 4 ]'
lab check 2000000 2000000 2000000 2000000
row "check: numbers instead of a log" '[ $rc -eq 0 ]' 'grep -q "^check passed" "$work/out"'
lab check 2000000 2000000 2300000 2000000
row "check: fails when less went out than the ledger says" '[ $rc -eq 1 ]' 'grep -q "^check failed; labtest2 sent less" "$work/out"'
lab check 2000000 1500000 2000000 2000000
row "check: fails when more went out" '[ $rc -eq 1 ]' 'grep -q "^check failed; labtest1 sent more" "$work/out"'
lab check --share 0.01 2000000 2000000 2000000 1900000
row "check: --share" '[ $rc -eq 1 ]' 'grep -q "^check failed.*; labtest3 sent more than the ledger + 0.01 %" "$work/out"'
lab check 2000000 2000000
row "check: fails when a rank is missing" '[ $rc -eq 1 ]' 'grep -q "2 ledgers .* expected one for each of 4 ranks" "$work/out"'
lab check "$work/none"
row "check: a log that is not there" 'one_line "expected a file, or numbers"'
lab run --check 4 "$work/ring" 0
row "run --check: fails without ledgers" '[ $rc -eq 1 ]' 'grep -q "0 ledgers" "$work/out"'
lab run 4 "$work/ring" 0 7
row "run: an exit code is handed on" '[ $rc -eq 7 ]'
lab run 8 "$work/ring" 500000
row "run: bytes inside a host are not on its link" '[ $rc -eq 0 ]' '[ "$(grep -c "^labtest.: ledger 500000 bytes" "$work/out")" -eq 4 ]'
lab down
row "down after runs leaves nothing" clean
if [ -c /dev/net/tun ]; then
    lab with 3 --rate 100mbit --loss 2% --delay 1 -- 3 "$work/ring" 3000000
    row "with: losses are mended by TCP, and counted" '[ $rc -eq 0 ]' 'grep -q "^check passed" "$work/out"' \
        'grep -q "relay: .* [1-9][0-9]* lost, 0 dropped" "$work/err"' clean
fi

# ---- interrupted

started() { ip netns pids labtest1 | xargs -r ps -o comm= -p | grep -q sleep; }
for signal in INT:130 TERM:143 HUP:129; do
    set -m # else the background ignores SIGINT
    bash "$lab" with 2 --rate 10mbit -- 2 sleep 30 > "$work/out" 2> "$work/err" < /dev/null &
    pid=$!
    set +m
    until_true 10 started || echo "the ranks did not start"
    kill -s ${signal%:*} -- "-$pid" # as a terminal does: to the whole group
    rc=0 && wait $pid || rc=$?
    row "with, SIG${signal%:*}: leaves nothing" "[ \$rc -eq ${signal#*:} ]" clean
done
bash "$lab" with 2 -- 2 bash -c 'trap "echo told; exit 0" USR1; sleep 30 & wait' > "$work/out" 2> "$work/err" < /dev/null &
pid=$!
until_true 10 started || echo "the ranks did not start"
kill -USR1 $pid
rc=0 && wait $pid || rc=$?
row "with, SIGUSR1: all ranks are told, and may end well" '[ $rc -eq 0 ]' '[ "$(grep -c told "$work/out")" -eq 2 ]' clean
bash "$lab" with 2 --rate 10mbit --delay 1 -- 2 sleep 30 > "$work/out" 2> "$work/err" < /dev/null &
pid=$!
until_true 10 started || echo "the ranks did not start"
lab down
row "down: refused while a with runs" 'one_line "held by process $pid (lab.sh with 2"'
kill -KILL $pid
wait $pid 2> /dev/null
lab run 2 true
row "a killed lab: run says so" 'one_line "type: lab.sh down"'
lab up 2
row "a killed lab: the next one removes what it left" '[ $rc -eq 0 ]' '! started' \
    'grep -q "removing what a killed lab left" "$work/err"' '! pgrep -f build/wire'
kill -KILL "$(cat /run/lab-labtest/keeper)"
lab down
row "a killed keeper: down removes all" '[ $rc -eq 0 ]' clean
close_down
