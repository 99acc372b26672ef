#!/usr/bin/env bash
# lab.sh - a cluster with slow links on one machine, to measure what training over a network costs. Every host is a network namespace
# with a host name of its own and two networks: `ctl`, unlimited, for starting programs, and `data`, whose links have the rate, delay
# and loss that were asked for. Rates alone are the kernel's token buckets (tbf); delay and loss come from a relay, dev/wire.c.
# Hosts reach only each other, and nothing outside the namespaces changes. Host K has the data address 10.78.0.(K+1).
#
#   lab.sh up HOSTS [--rate RATE] [--delay MS] [--loss P] [--host K key=value,...]...
#       RATE: 10mbit, 2.5gbit, none (default); MS one way; P a share (0.001) or 0.1%. --host sets the rate, delay, loss of one host,
#       or cpu=50% (of one core). Two hosts are half of one's delay and half of the other's apart; losses likewise.
#   lab.sh rate RATE [HOST]                     changes it while the lab is up
#   lab.sh run [--check] RANKS COMMAND...       RANKS ranks by mpirun (Open MPI) over TCP, consecutive ranks on one host
#   lab.sh on HOST COMMAND...                   a command on one host
#   lab.sh counters                             what each host's data link has sent and received, tab-separated
#   lab.sh check [--share PERCENT] LOG          is what the links sent in the last run what its ledger says? LOG holds the trainer's
#                                               lines "network, rank 0: ... N between"; or give the numbers, one a rank
#   lab.sh status
#   lab.sh down                                 removes everything, also what a killed lab left
#   lab.sh with HOSTS [options of up] -- [--check] RANKS COMMAND...     up, run, check, down; also when interrupted
#
# Needs root, iproute2, util-linux; run needs Open MPI, delay and loss a C compiler and /dev/net/tun. One lab at a time, since labs slow
# each other down; LAB_NAME=other makes a second one all the same.
# The ranks share this machine's cores: OMP_NUM_THREADS is the fair share unless it is set.
set -euo pipefail

name=${LAB_NAME:-gptlab}
[[ $name =~ ^[a-z]{1,12}$ ]] || { echo "error: LAB_NAME $name: expected up to 12 small letters" >&2 && exit 1; }
readonly name state=/run/lab-$name ctl=10.77.0 data=10.78.0
readonly hosts_max=64 ranks_max=256 share_default=8 slack=131072 # bytes that the check allows a host beyond its share
self=$(realpath "${BASH_SOURCE[0]}")
readonly self root=${self%/scripts/*}

say() { echo "lab: $*" >&2; }
fail() {
    echo "error: $*" >&2
    exit 1
}
usage() {
    sed -n '/^#   lab.sh up/,/^# Needs/{ /^# Needs/d; s/^# \{0,3\}//; p }' "$self"
    exit 0
}

in_space() { # namespace command...
    local space=$1
    shift
    nsenter --net="/run/netns/$space" "$@"
}
spaces() { ip netns list 2> /dev/null | awk -v name="$name" '$1 ~ "^" name "(-hub|[0-9]+)$" { print $1 }'; }
host_count() { wc -l < "$state/hosts"; }

need_rights() {
    local tool
    [ "$EUID" -eq 0 ] || fail "the lab needs root (network namespaces)"
    for tool in ip tc nsenter unshare flock awk; do
        command -v $tool > /dev/null || fail "the lab needs $tool: install iproute2 and util-linux"
    done
    unshare --net --uts true 2> /dev/null || fail "network namespaces are not permitted here (a container needs --privileged)"
}

# ---- who holds the lab. The lock goes with the process: fd 9 stays open in `with`, or in a sleeping keeper after `up`.

locked() { [ -e "$state/lock" ] && ! flock -n -s "$state/lock" true 2> /dev/null; }
holder() { cat "$state/holder" 2> /dev/null || echo "a process that is just starting"; }

take_lock() { # what for
    mkdir -p "$state"
    while :; do
        exec 9>> "$state/lock"
        flock -w 1 9 || fail "a lab is up, held by $(holder)"
        [ ! /dev/fd/9 -ef "$state/lock" ] || break # else a `down` removed it in between
        mkdir -p "$state"
    done
    echo "process $$ ($*), since $(date '+%F %T')" > "$state/holder"
}

need_lab() {
    [ -e "$state/ready" ] || fail "no lab is up; see: lab.sh up"
    locked || fail "the lab's keeper was killed; type: lab.sh down"
}

# ---- values

rate_bits() { # 100mbit -> 100000000; none -> 0
    [ "$1" != none ] || { echo 0 && return; }
    [[ $1 =~ ^([0-9]{1,7}(\.[0-9]{1,3})?)([kmg])bit$ ]] || fail "rate $1: expected a number with kbit, mbit or gbit, or none"
    awk -v n="${BASH_REMATCH[1]}" -v unit="${BASH_REMATCH[3]}" 'BEGIN {
        bits = n * (unit == "k" ? 1e3 : unit == "m" ? 1e6 : 1e9)
        if (bits < 1e4 || bits > 1e11) { exit 1 }
        printf "%.0f\n", bits }' || fail "rate $1: expected 10kbit to 100gbit"
}

delay_us() { # milliseconds -> microseconds
    if ! [[ $1 =~ ^[0-9]{1,4}(\.[0-9]{1,3})?$ ]] || awk -v d="$1" 'BEGIN { exit !(d > 2000) }'; then
        fail "delay $1: expected 0 to 2000 ms"
    fi
    awk -v d="$1" 'BEGIN { printf "%.0f\n", d * 1000 }'
}

loss_share() { # 0.1% or 0.001 -> 0.001
    local number=${1%\%} scale=1
    [ "$number" = "$1" ] || scale=100
    if ! [[ $number =~ ^[0-9]{1,3}(\.[0-9]{1,8})?$ ]] || awk -v p="$number" -v s=$scale 'BEGIN { exit !(p / s > 0.5) }'; then
        fail "loss $1: expected a share of 0 to 0.5, or 0% to 50%"
    fi
    awk -v p="$number" -v s=$scale 'BEGIN { printf "%.9g\n", p / s }'
}

cpu_percent() { # 50% -> 50
    local most=$(($(nproc) * 100)) number=${1%\%}
    if ! [[ $1 =~ ^[1-9][0-9]{0,5}%$ ]] || [ "$number" -lt 5 ] || [ "$number" -gt "$most" ]; then
        fail "cpu $1: expected 5% to $most% (of one core)"
    fi
    echo "$number"
}

count_in() { # what value low high
    if ! [[ $2 =~ ^(0|[1-9][0-9]{0,5})$ ]] || [ "$2" -lt "$3" ] || [ "$2" -gt "$4" ]; then fail "$1 $2: expected $3 to $4"; fi
}

# Reads the options of `up` into rates, delays, losses, cpus and relay; rest: what follows `--`.
parse_up() {
    local rate=0 delay=0 loss=0 own=() k pair value
    relay=0 rest=()
    [ $# -gt 0 ] || fail "expected the number of hosts"
    count_in hosts "$1" 2 $hosts_max
    hosts=$1
    shift
    while [ $# -gt 0 ]; do
        [ "$1" != -- ] || { shift && rest=("$@") && break; }
        case $1 in --rate | --delay | --loss | --host) [ $# -gt 1 ] || fail "$1 needs a value" ;; esac
        case $1 in
            --rate) rate=$(rate_bits "$2") ;;
            --delay) delay=$(delay_us "$2") relay=1 ;;
            --loss) loss=$(loss_share "$2") relay=1 ;;
            --host)
                [ $# -gt 2 ] || fail "--host needs a host and its values, such as: --host 1 rate=10mbit,delay=5"
                count_in host "$2" 0 $((hosts - 1))
                own+=("$2 $3")
                shift
                ;;
            *) fail "$1: expected --rate, --delay, --loss or --host" ;;
        esac
        shift 2
    done
    rates=() delays=() losses=() cpus=()
    for ((k = 0; k < hosts; k++)); do rates[k]=$rate delays[k]=$delay losses[k]=$loss cpus[k]=-; done
    for pair in ${own[@]+"${own[@]}"}; do
        k=${pair%% *}
        IFS=, read -r -a values <<< "${pair#* }"
        for value in ${values[@]+"${values[@]}"}; do
            case $value in
                rate=*) rates[k]=$(rate_bits "${value#*=}") ;;
                delay=*) delays[k]=$(delay_us "${value#*=}") relay=1 ;;
                loss=*) losses[k]=$(loss_share "${value#*=}") relay=1 ;;
                cpu=*) cpus[k]=$(cpu_percent "${value#*=}") ;;
                *) fail "host $k, $value: expected rate=, delay=, loss= or cpu=" ;;
            esac
        done
    done
}

# ---- up

# In a namespace without IPv6's own chatter, and with the congestion control that behaves the same from run to run.
make_space() { # namespace
    ip netns add "$1"
    # shellcheck disable=SC2016  # for the shell inside
    in_space "$1" sh -c 'cd /proc/sys/net
        for k in all default; do [ ! -e ipv6/conf/$k ] || echo 1 > ipv6/conf/$k/disable_ipv6; done
        echo reno > ipv4/tcp_congestion_control
        echo 1 > ipv4/tcp_no_metrics_save'
    ip -n "$1" link set lo up
}

make_bridge() { # device
    ip -n "$name-hub" link add name "$1" type bridge mcast_snooping 0
    ip -n "$name-hub" link set dev "$1" up
}

plug() { # host device subnet: a cable from the host to the bridge of that name
    ip -n "$name$1" link add name "$2" type veth peer name "$2$1" netns "$name-hub"
    ip -n "$name-hub" link set dev "$2$1" master "$2" up
    ip -n "$name$1" addr add "$3.$(($1 + 1))/24" dev "$2"
    ip -n "$name$1" link set dev "$2" up
}

# A bucket of 5 ms, so that a message of some size feels the rate, but never below 16 kB. Packets are cut to the MTU before they are
# counted: the counters then hold every header, as a real link does.
shape() { # namespace device bits
    local burst=$(($3 / 8 / 200))
    [ $burst -ge 16384 ] || burst=16384
    if [ "$3" -eq 0 ]; then
        tc -n "$1" qdisc del dev "$2" root 2> /dev/null || true
        ip -n "$1" link set dev "$2" gso_max_segs 65535
    else
        ip -n "$1" link set dev "$2" gso_max_segs 1
        tc -n "$1" qdisc replace dev "$2" root tbf rate "${3}bit" burst $burst latency 200ms 2> /dev/null ||
            fail "tc cannot limit a rate here: the kernel lacks sch_tbf"
    fi
}

# A share of the processor, by a control group (version 2 or 1) that the commands of the host start in.
limit_cpu() { # host percent
    local top group quota=$(($2 * 200)) period=20000 # us
    top=$(awk '$3 == "cgroup2" { print $2; exit }' /proc/self/mounts)
    if [ -n "$top" ] && grep -qw cpu "$top/cgroup.controllers" 2> /dev/null; then
        group=$top/$name$1
        if ! grep -qw cpu "$top/cgroup.subtree_control" && echo +cpu 2> /dev/null > "$top/cgroup.subtree_control"; then
            echo "$top" > "$state/cpu-enabled"
        fi
        mkdir -p "$group" 2> /dev/null && echo $quota $period 2> /dev/null > "$group/cpu.max" && echo "$group" > "$state/cgroup$1" && return
    else
        top=$(awk '$3 == "cgroup" && $4 ~ /(^|,)cpu(,|$)/ { print $2; exit }' /proc/self/mounts)
        group=$top/$name$1
        [ -n "$top" ] && mkdir -p "$group" 2> /dev/null && echo $period 2> /dev/null > "$group/cpu.cfs_period_us" &&
            echo $quota 2> /dev/null > "$group/cpu.cfs_quota_us" && echo "$group" > "$state/cgroup$1" && return
    fi
    rmdir "$group" 2> /dev/null || true
    say "notice: no CPU quota is permitted on this machine: host $1 runs at full speed"
}

write_tables() { # from rates, delays, losses, cpus
    local k
    for ((k = 0; k < hosts; k++)); do echo "$k ${rates[k]} ${delays[k]} ${losses[k]} ${cpus[k]}"; done > "$state/hosts.new"
    awk -v name="$name" -v net=$data '{ print name $1, net "." $1 + 1, $2, $3, $4 }' "$state/hosts.new" > "$state/wire.table"
    mv "$state/hosts.new" "$state/hosts"
}

read_tables() {
    local k
    hosts=$(host_count)
    while read -r k rate delay loss cpu; do rates[k]=$rate delays[k]=$delay losses[k]=$loss cpus[k]=$cpu; done < "$state/hosts"
}

build_wire() {
    local cc=${CC:-cc} source=$root/dev/wire.c
    [ -c /dev/net/tun ] || fail "delay and loss need /dev/net/tun, which is not here"
    if [ ! "$root/build/wire" -nt "$source" ]; then
        command -v "$cc" > /dev/null || fail "delay and loss need a C compiler for dev/wire.c; $cc is not there"
        mkdir -p "$root/build"
        "$cc" -std=gnu11 -O2 -Wall -Wextra "$source" -o "$root/build/wire"
    fi
}

start_wire() {
    local k waited=0
    for ((k = 0; k < hosts; k++)); do
        ip -n "$name$k" tuntap add dev data mode tun || fail "cannot make a TUN device: the kernel lacks it"
        ip -n "$name$k" addr add $data.$((k + 1))/24 dev data
        ip -n "$name$k" link set dev data mtu 9000 txqueuelen 2000 up
    done
    setsid "$root/build/wire" "$state/wire.table" data > "$state/wire.log" 2>&1 < /dev/null 9>&- &
    echo $! > "$state/wire.pid"
    until grep -q ready "$state/wire.log"; do
        if [ $waited -ge 100 ] || ! kill -0 "$(cat "$state/wire.pid")" 2> /dev/null; then fail "the relay did not start: $(cat "$state/wire.log")"; fi
        waited=$((waited + 1))
        sleep 0.05
    done
}

build_lab() {
    local k
    [ "$relay" -eq 0 ] || build_wire
    write_tables
    make_space "$name-hub"
    make_bridge ctl
    ip -n "$name-hub" addr add $ctl.254/24 dev ctl
    [ "$relay" -eq 1 ] || make_bridge data
    for ((k = 0; k < hosts; k++)); do
        make_space "$name$k"
        plug $k ctl $ctl
        if [ "$relay" -eq 0 ]; then
            plug $k data $data
            shape "$name$k" data "${rates[k]}"
            shape "$name-hub" data$k "${rates[k]}"
        fi
        [ "${cpus[k]}" = - ] || limit_cpu $k "${cpus[k]}"
    done
    [ "$relay" -eq 0 ] || start_wire
    { # what ssh would be on a real cluster: agent [options] ADDRESS COMMAND...
        echo '#!/bin/sh'
        # shellcheck disable=SC2016  # for the script that is written
        echo 'while [ "${1#-}" != "$1" ]; do shift; done; host=$((${1##*.} - 1)); shift'
        # shellcheck disable=SC2016
        printf 'LAB_NAME=%s exec %q on "$host" sh -c "$*"\n' "$name" "$self"
    } > "$state/agent"
    chmod +x "$state/agent"
    touch "$state/ready"
}

describe() {
    awk -v relay="$([ -e "$state/wire.pid" ] && echo 1 || echo 0)" -v name="$name" -v net=$data '{
        printf "%s  %s.%d  %s", name $1, net, $1 + 1, $2 == 0 ? "no rate limit" : $2 / 1e6 " Mbit/s"
        if (relay) { printf ", delay %g ms, loss %g", $3 / 1e3, $4 }
        printf "%s\n", $5 == "-" ? "" : ", cpu " $5 "%" }' "$state/hosts"
}

# ---- down

end_wire() {
    local pid
    pid=$(cat "$state/wire.pid" 2> /dev/null) || return 0
    grep -qs "$state/wire.table" "/proc/$pid/cmdline" || return 0 # by now the number may be another's
    kill -TERM "$pid" 2> /dev/null || true
    for _ in $(seq 40); do
        [ -e "/proc/$pid/exe" ] || break
        sleep 0.05
    done
    kill -KILL "$pid" 2> /dev/null || true
    sed -n "s/^wire: \($name.*\)/lab: relay: \1/p" "$state/wire.log" >&2
}

pids_in() { for space in "$@"; do ip netns pids "$space" 2> /dev/null || true; done; }

# Ends what runs in the lab's namespaces: asks for 2 s, then insists.
end_processes() {
    local pids signal=TERM turn
    for turn in $(seq 30); do
        pids=$(pids_in "$@")
        [ -n "$pids" ] || break
        [ "$turn" -le 20 ] || signal=KILL
        # shellcheck disable=SC2086  # one word per process
        kill -$signal $pids 2> /dev/null || true
        sleep 0.1
    done
}

# All that carries the lab's name, whoever made it, but for the lock, which we hold.
clear_lab() {
    local all space file group
    end_wire
    mapfile -t all < <(spaces)
    end_processes ${all[@]+"${all[@]}"}
    for space in ${all[@]+"${all[@]}"}; do ip netns del "$space" || say "notice: namespace $space is still there"; done
    for file in "$state"/cgroup*; do
        [ -e "$file" ] || continue
        group=$(cat "$file")
        for _ in 1 2 3 4 5; do # its processes may still be on their way out
            rmdir "$group" 2> /dev/null && break
            sleep 0.1
        done
    done
    if [ -e "$state/cpu-enabled" ]; then echo -cpu 2> /dev/null > "$(cat "$state/cpu-enabled")/cgroup.subtree_control" || true; fi
    find "$state" -mindepth 1 ! -name lock ! -name holder -delete
}

remove_lab() {
    trap '' INT TERM HUP USR1 # once begun it is finished
    clear_lab
    rm -rf "$state"
}

keeper() { # the process that holds the lock after `up`, if it is alive
    local pid
    pid=$(cat "$state/keeper" 2> /dev/null) && grep -qs "$name-keeper" "/proc/$pid/cmdline" && echo "$pid"
}

# ---- counters and the check

counters() {
    local k
    printf 'host\tbytes_sent\tpackets_sent\tbytes_received\tpackets_received\n'
    for ((k = 0; k < $(host_count); k++)); do
        in_space "$name$k" cat /proc/self/net/dev | awk -v OFS='\t' -v host="$name$k" 'sub(/^ *data:/, "") { print host, $9, $10, $1, $2 }'
    done
}

# The ledgers' bytes "between" of ranks 0, 1, ..., from the last such line of each rank, or as given.
ledger_numbers() {
    if [ $# -eq 1 ] && [ -e "$1" ]; then
        sed -n -E 's/^.*network, rank ([0-9]+): .*[ ,]([0-9]+) between.*$/\1 \2/p' "$1" |
            awk '{ n[$1] = $2 } END { for (r in n) print r, n[r] }' | sort -n
    else
        local rank=0 number
        for number in "$@"; do
            [[ $number =~ ^[0-9]{1,18}$ ]] || fail "check $number: expected a file, or numbers of bytes, one a rank"
            echo "$rank $number"
            rank=$((rank + 1))
        done
    fi
}

check() { # [--share PERCENT] LOG or numbers
    local share=$share_default frame=66 # Ethernet, IP and TCP with time stamps
    if [ "${1:-}" = --share ]; then
        [[ ${2:-} =~ ^[0-9]{1,3}(\.[0-9]+)?$ ]] || fail "--share ${2:-}: expected a percentage"
        share=$2
        shift 2
    fi
    [ $# -gt 0 ] || fail "check what? give the log of the run, or its ledgers' bytes between nodes, one a rank"
    [ -e "$state/after" ] || fail "nothing has run in this lab yet"
    [ ! -e "$state/wire.pid" ] || frame=52
    ledger_numbers "$@" > "$state/ledger"
    awk -v share="$share" -v slack=$slack -v frame=$frame -v given="$*" '
        function stop(text) { print text; failed = 1; exit 1 }
        FILENAME ~ /layout$/ { host[$1] = $2; ranks++; next }
        FILENAME ~ /before$/ { if (FNR > 1) { bytes[$1] = -$2; packets[$1] = -$3 } next }
        FILENAME ~ /after$/ { if (FNR > 1) { bytes[$1] += $2; packets[$1] += $3; order[hosts++] = $1 } next }
        !($1 in host) { stop("check failed: rank " $1 " has a ledger, but only " ranks " ranks ran") }
        { ledger[host[$1]] += $2; lines++ }
        END {
            if (failed) exit 1
            if (lines != ranks) stop("check failed: " lines + 0 " ledgers in " given ", expected one for each of " ranks " ranks")
            for (k = 0; k < hosts; k++) {
                h = order[k]
                above = ledger[h] > 0 ? 100 * (bytes[h] - ledger[h]) / ledger[h] : 0
                headers = ledger[h] > 0 ? 100 * frame * packets[h] / ledger[h] : 0
                printf "%s: ledger %.0f bytes, sent %.0f in %.0f packets: ", h, ledger[h], bytes[h], packets[h]
                printf "%.2f %% above it (TCP/IP headers %.2f %%, the rest %.2f %%)\n", above, headers, above - headers
                if (bytes[h] < ledger[h]) { why = why "; " h " sent less than its ledger says" }
                if (bytes[h] > ledger[h] * (1 + share / 100) + slack) {
                    why = why "; " h " sent more than the ledger + " share " % + " slack " bytes"
                }
            }
            if (why != "") stop("check failed" why)
            print "check passed: every host sent what its ledger says, and less than " share " % + " slack " bytes above it"
        }' "$state/layout" "$state/before" "$state/after" "$state/ledger"
}

# ---- run

find_mpirun() {
    local program
    for program in mpirun mpirun.openmpi; do
        if $program --version 2> /dev/null | grep -q 'Open MPI'; then echo $program && return; fi
    done
    fail "run needs mpirun of Open MPI (Debian: openmpi-bin)"
}

# rank and host of each rank: as many on each host as can be, the first hosts one more, consecutive ranks together
lay_out() { # ranks
    awk -v ranks="$1" -v hosts="$(host_count)" -v name="$name" 'BEGIN {
        for (k = r = 0; k < hosts; k++) { for (n = int(ranks / hosts) + (k < ranks % hosts); n > 0; n--) { print r++, name k } } }' > "$state/layout"
}

job="" stopped=""
# A signal to us alone, since mpirun has a session of its own: one that ends the run, or SIGUSR1, which mpirun hands on to the ranks.
on_signal() {
    if [ "$1" = USR1 ]; then
        [ -z "$job" ] || kill -USR1 "$job" 2> /dev/null || true
        return 0
    fi
    stopped=$1
    [ -n "$job" ] || leave
    say "SIG$1: ending the run"
    kill -TERM "$job" 2> /dev/null || true
}
leave() {
    case $stopped in INT) exit 130 ;; HUP) exit 129 ;; *) exit 143 ;; esac
}

# Waits for the job whatever signals come; after one that ends it, for 10 s at most. Its exit code is ours.
wait_job() {
    local rc=0 left=100
    while kill -0 "$job" 2> /dev/null; do
        if [ -z "$stopped" ]; then
            wait "$job" || true
        else
            left=$((left - 1))
            [ $left -gt 0 ] || kill -KILL "$job" 2> /dev/null || true
            sleep 0.1
        fi
    done
    wait "$job" || rc=$?
    return $rc
}

# Reads the arguments of `run` into must, ranks and rest, before anything is made.
parse_run() { # [--check] ranks command...
    must=0
    [ "${1:-}" != --check ] || { must=1 && shift; }
    [ $# -gt 1 ] || fail "expected the number of ranks and a command"
    count_in ranks "$1" 1 $ranks_max
    ranks=$1
    shift
    rest=("$@")
}

run_ranks() { # command...
    local mpirun list rc=0 tee threads
    mpirun=$(find_mpirun)
    lay_out "$ranks"
    list=$(awk -v net=$ctl '{ n[$2]++; if (n[$2] == 1) order[hosts++] = $2 }
        END { for (k = 0; k < hosts; k++) printf "%s%s.%d:%d", k ? "," : "", net, k + 1, n[order[k]] }' "$state/layout")
    threads=$(($(nproc) / ranks))
    [ $threads -gt 0 ] || threads=1
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads}
    exec 8>> "$state/run.lock"
    flock -n 8 || fail "another run is going on in the lab"
    rm -f "$state/out"
    mkfifo "$state/out"
    mkdir -p "$state/tmp"
    tee "$state/log" < "$state/out" 8>&- 9>&- &
    tee=$!
    say "$ranks ranks, OMP_NUM_THREADS=$OMP_NUM_THREADS: $*"
    counters > "$state/before"
    # Cores are shared by all hosts, so each must not bind its first rank to core 0. All else is Open MPI's default.
    nsenter --net="/run/netns/$name-hub" setsid "$mpirun" --allow-run-as-root -np "$ranks" --host "$list" --map-by slot --bind-to none \
        --mca plm rsh --mca plm_rsh_agent "$state/agent" --mca plm_rsh_no_tree_spawn 1 --mca orte_tmpdir_base "$state/tmp" \
        --mca oob_tcp_if_include $ctl.0/24 --mca pml ob1 --mca btl tcp,self --mca btl_tcp_if_include $data.0/24 \
        "$@" > "$state/out" < /dev/null 8>&- 9>&- &
    job=$!
    wait_job || rc=$?
    job=""
    counters > "$state/after"
    for _ in $(seq 50); do # what it says last; but a rank that outlived mpirun may still hold the pipe
        kill -0 $tee 2> /dev/null || break
        sleep 0.1
    done
    kill $tee 2> /dev/null || true
    [ -z "$stopped" ] || leave
    [ $rc -eq 0 ] || return $rc
    if [ "$must" -eq 1 ] || grep -q 'network, rank [0-9]*: ' "$state/log"; then check "$state/log"; fi
}

# ---- commands

begin() { # what for: takes the lock and removes what is left of a lab whose holder is gone
    need_rights
    take_lock "$1"
    trap remove_lab EXIT
    for signal in INT TERM HUP USR1; do
        # shellcheck disable=SC2064  # the name as it is now
        trap "on_signal $signal" $signal
    done
    [ -z "$(spaces)" ] || say "removing what a killed lab left"
    clear_lab
}

command_up() {
    parse_up "$@"
    [ ${#rest[@]} -eq 0 ] || fail "up takes no command; see: lab.sh with"
    begin "lab.sh up $*"
    build_lab
    # shellcheck disable=SC2016  # for the shell that is started
    setsid bash -c 'exec -a "$0" sleep infinity' "$name-keeper" > /dev/null 2>&1 < /dev/null &
    echo $! > "$state/keeper"
    echo "process $!, the keeper of lab.sh up $*, since $(date '+%F %T'); lab.sh down ends it" > "$state/holder"
    trap - EXIT
    describe
}

command_with() {
    parse_up "$@"
    [ ${#rest[@]} -gt 0 ] || fail "with needs a command: lab.sh with HOSTS [options] -- RANKS COMMAND..."
    parse_run "${rest[@]}"
    begin "lab.sh with $*"
    build_lab
    describe >&2
    run_ranks "${rest[@]}"
}

command_run() {
    parse_run "$@"
    need_rights
    need_lab
    trap 'on_signal INT' INT
    trap 'on_signal TERM' TERM
    trap 'on_signal HUP' HUP
    trap 'on_signal USR1' USR1
    run_ranks "${rest[@]}"
}

command_on() {
    [ $# -gt 1 ] || fail "expected a host and a command"
    need_rights
    [ -e "$state/ready" ] || fail "no lab is up; see: lab.sh up"
    count_in host "$1" 0 $(($(host_count) - 1))
    local host=$1
    shift
    [ ! -e "$state/cgroup$host" ] || echo $$ > "$(cat "$state/cgroup$host")/cgroup.procs"
    # shellcheck disable=SC2016  # for the shell that is started
    exec nsenter --net="/run/netns/$name$host" unshare --uts sh -c 'echo "$0" > /proc/sys/kernel/hostname; exec "$@"' "$name$host" "$@"
}

command_rate() {
    case $# in 1 | 2) ;; *) fail "expected: lab.sh rate RATE [HOST]" ;; esac
    local bits k
    bits=$(rate_bits "$1")
    need_rights
    need_lab
    read_tables
    [ $# -eq 1 ] || count_in host "$2" 0 $((hosts - 1))
    for ((k = 0; k < hosts; k++)); do
        [ "${2:-$k}" = $k ] || continue
        rates[k]=$bits
        [ ! -e "$state/wire.pid" ] || continue
        shape "$name$k" data "$bits"
        shape "$name-hub" data$k "$bits"
    done
    write_tables
    [ ! -e "$state/wire.pid" ] || kill -HUP "$(cat "$state/wire.pid")"
    describe
}

command_down() {
    local pid
    [ $# -eq 0 ] || fail "down takes no arguments"
    need_rights
    if pid=$(keeper); then
        if [ -e "$state/run.lock" ] && ! flock -n "$state/run.lock" true; then fail "a run is going on in the lab; end that first"; fi
        kill -TERM "$pid"
    elif [ ! -e "$state" ] && [ -z "$(spaces)" ]; then
        say "nothing is up"
        return
    fi
    take_lock "lab.sh down"
    remove_lab
    say "all removed"
}

case ${1:-help} in
    up | with | run | on | rate | down | check | counters)
        command=$1
        shift
        ;;
    status)
        if [ -e "$state/ready" ]; then describe; else say "no lab is up"; fi
        exit 0
        ;;
    help | -h | --help) usage ;;
    *) fail "$1: expected up, with, run, on, rate, counters, check, status, down or help" ;;
esac
case $command in
    check | counters)
        need_rights
        [ -e "$state/ready" ] || fail "no lab is up; see: lab.sh up"
        $command "$@"
        ;;
    *) "command_$command" "$@" ;;
esac
