#!/usr/bin/env bash
#
# rdma-vm.sh: runs a command on a machine with four RDMA devices.  It needs no RDMA
# hardware, no privileges in the host kernel, and only Debian packages.
#
# It boots Debian's kernel in QEMU (with software emulation by default) and loads
# soft-RoCE (rdma_rxe) there.  It runs the command in that guest, with a host directory
# mounted read-write at the same path.  Exit status, standard output and standard
# error are those of the command.
#
#   rdma-vm.sh [options] [--] COMMAND [ARG...]
#   rdma-vm.sh [options] --setup            only install, download and build
#
#   -d DIR    host directory that the guest sees at the same path (default: the
#             current one); it is also the command's working directory
#   -w DIR    directory that keeps kernel and guest root between runs
#             (default: $RDMA_VM_WORK, or target/rdma-vm of this project)
#   -p PKGS   additional Debian packages in the guest root ("python3 strace")
#   -H        use the host's / as the guest root, read-only under a tmpfs, so the
#             guest has every library of the host.
#             Needs ip and rdma (iproute2) on the host.
#   -e N=V    set a variable in the command's environment (can be repeated)
#   -n NETEM  impair both wires in both directions, in the syntax of tc-netem(8)
#             ("loss 1%")
#   -t SEC    stop the guest after SEC seconds, exit status 124 (default 600)
#   -m MIB    guest memory (default 1024)     -c N  processors (default 2)
#   -k PKG    kernel package (default: the dependency of linux-image-6.12-amd64, or of
#             linux-image-amd64 if that does not exist).  Soft-RoCE in Linux 6.1 reports
#             reads as done although a retransmission left them incomplete.
#   -a ACCEL  tcg (default), kvm, or auto: kvm if a guest boots with it
#   -v        print timings and the console on standard error
#
# The guest has two wires (veth pairs), so two sides with two NICs each:
#   rxe0 on va0, 10.77.0.1    rxe1 on vb0, 10.77.0.2
#   rxe2 on va1, 10.78.0.1    rxe3 on vb1, 10.78.0.2
# GID index 1 is the IPv4 RoCE v2 one.  Index 0 is the link-local one, which UCX 1.13
# needs (UCX_IB_GID_INDEX=0).  The path MTU is 4096.  All ends are in one network
# namespace, because rxe in this kernel knows only the first one.  Policy routing
# sends packets for 10.77.0.2 out by va0 and packets for 10.77.0.1 out by vb0, unless
# sender and receiver have the same address.  Packets therefore cross a wire, and
# netem can drop, delay and reorder them.  An rdma_cm client leaves by the other device
# than the one whose address it connects to.  A device also reaches itself.
#
# "ip link set va1 down" cuts the second wire for verbs and sockets: no packet takes
# another path.  After "ip link set va1 up" its routes return a moment later.
#
# Exit status 125 means that there is no guest, or that it ended before the command
# (its console is then shown).  A second run reuses the files of the first in -w.

set -euo pipefail

die()  { printf 'rdma-vm: %s\n' "$*" >&2; exit 125; }
say()  { [ -z "$verbose" ] || printf 'rdma-vm: %5ss  %s\n' "$SECONDS" "$*" >&2; }
# "--help" prints the comment above
help() { sed -n '3,/^$/s/^# \{0,1\}//p' "$0"; }

hostdir=$PWD
work=${RDMA_VM_WORK:-$(dirname "$(realpath "$0")")/../target/rdma-vm}
more_pkgs='' hostroot='' netem='' limit=600 mem=1024 cpus=2 kernel_pkg=''
accel=tcg verbose='' setup_only='' envs=()

while [ $# -gt 0 ]; do
    case $1 in -[dwpentmcka]) [ $# -ge 2 ] || die "$1 needs a value" ;; esac
    case $1 in
        -d) hostdir=$2; shift ;;
        -w) work=$2; shift ;;
        -p) more_pkgs=$2; shift ;;
        -H) hostroot=1 ;;
        -e) envs+=("$2"); shift ;;
        -n) netem=$2; shift ;;
        -t) limit=$2; shift ;;
        -m) mem=$2; shift ;;
        -c) cpus=$2; shift ;;
        -k) kernel_pkg=$2; shift ;;
        -a) accel=$2; shift ;;
        -v) verbose=1 ;;
        --setup) setup_only=1 ;;
        -h|--help) help; exit 0 ;;
        --) shift; break ;;
        -*) die "unknown option $1 (try --help)" ;;
        *) break ;;
    esac
    shift
done
[ -n "$setup_only" ] || [ $# -gt 0 ] || die 'no command (try --help)'
hostdir=$(realpath -e -- "$hostdir") || die 'the host directory does not exist'
[ "$hostdir" != / ] || die 'the host directory cannot be /'
case $hostdir in *[,:\ ]*) die "cannot share $hostdir: its name contains a comma, a colon or a blank" ;; esac
mkdir -p "$work"
work=$(realpath "$work")

# ---------------------------------------------------------------- packages --

# The packages of the guest root, without their dependencies.  busybox-static is also the
# only program of the initramfs, and replaces small commands that the list omits (awk,
# ping, ...); xz and zstd unpack the kernel.
guest_pkgs="bash coreutils iproute2 procps busybox-static xz-utils zstd
    libibverbs1 ibverbs-providers ibverbs-utils librdmacm1 rdmacm-utils
    perftest $more_pkgs"

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }

updated=''
apt_update() {
    [ -z "$updated" ] || return 1
    say 'apt-get update'
    as_root apt-get -qq update >&2 || return 1
    updated=1
}

# Runs apt as on a machine without installed packages, with a separate cache.  apt then
# names and downloads all dependencies of a package.  This needs no root.
apt_void() {
    local tool=$1; shift
    "$tool" -qq -o Dir::State::status="$work/apt/status" \
        -o Dir::Cache="$work/apt" -o Debug::NoLocking=true \
        -o APT::Sandbox::User=root -o APT::Install-Recommends=false "$@"
}

host_tools() {
    command -v qemu-system-x86_64 >/dev/null && return
    say 'installing qemu-system-x86'
    local get=(env DEBIAN_FRONTEND=noninteractive apt-get -qq -y
               --no-install-recommends install qemu-system-x86)
    as_root "${get[@]}" >"$work/apt.log" 2>&1 ||
        { apt_update && as_root "${get[@]}" >"$work/apt.log" 2>&1; } ||
        { cat "$work/apt.log" >&2; die 'cannot install qemu-system-x86'; }
}

fetch_packages() {
    mkdir -p "$work/apt/archives/partial"
    : >"$work/apt/status"
    apt_void apt-cache show linux-image-amd64 >/dev/null 2>&1 || apt_update ||
        die 'apt does not know linux-image-amd64: this script needs Debian'
    if [ -z "$kernel_pkg" ]; then
        kernel_pkg=$(apt_void apt-cache depends linux-image-6.12-amd64 linux-image-amd64 2>/dev/null |
            sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p' | head -n 1) || true
    fi
    [ -n "$kernel_pkg" ] || die 'cannot determine the kernel package: pass one with -k'
    say "downloading $kernel_pkg and the guest's packages"
    # shellcheck disable=SC2086
    download() {
        rm -f "$work"/apt/archives/*.deb
        apt_void apt-get -y -d install $guest_pkgs </dev/null &&
            mkdir -p "$work/apt/kernel" && rm -f "$work"/apt/kernel/*.deb &&
            (cd "$work/apt/kernel" && apt_void apt-get download "$kernel_pkg")
    }
    # An outdated package index names files that no longer exist.
    download >"$work/apt.log" 2>&1 ||
        { apt_update && download >"$work/apt.log" 2>&1; } ||
        { cat "$work/apt.log" >&2; die 'cannot download packages'; }
}

# -------------------------------------------------------------- guest root --

absent() { [ ! -e "$1" ] && [ ! -L "$1" ]; }

build_root() {
    say 'unpacking the guest root'
    local root=$work/root deb dir applet link target
    rm -rf "$root"
    mkdir -p "$root"/usr/{bin,sbin,lib,lib64}
    for dir in bin sbin lib lib64; do ln -s "usr/$dir" "$root/$dir"; done
    for deb in "$work"/apt/archives/*.deb; do
        dpkg-deb --fsys-tarfile "$deb" |
            tar -x --keep-directory-symlink --no-same-owner -C "$root" \
                --exclude './usr/share/doc/*' --exclude './usr/share/man/*' \
                --exclude './usr/share/locale/*'
    done
    # No maintainer script runs.  Only the links of update-alternatives matter
    # (libfabric needs a library behind one), so the loop below creates them.
    for deb in "$work"/apt/archives/*.deb; do
        { dpkg-deb --ctrl-tarfile "$deb" | tar -xO ./postinst 2>/dev/null || true; } |
            sed -e :a -e '/\\$/{N;s/\\\n//;ba' -e '}' |
            sed -n 's/.*update-alternatives.* --install  *\(\/[^ $]*\)  *[^ ]*  *\(\/[^ $]*\) .*/\1 \2/p' |
            while read -r link target; do
                if [ -e "$root$target" ] && absent "$root$link"; then
                    mkdir -p "$root${link%/*}"
                    ln -s "$target" "$root$link"
                fi
            done
    done
    mkdir -p "$root"/{etc,proc,sys,dev,tmp,run,root,mnt,var/tmp}
    echo 'root:x:0:0:root:/root:/bin/bash' >"$root/etc/passwd"
    echo 'root:x:0:' >"$root/etc/group"
    printf '%s\n' '127.0.0.1 localhost' '10.77.0.1 rxe0' '10.77.0.2 rxe1' \
        '10.78.0.1 rxe2' '10.78.0.2 rxe3' >"$root/etc/hosts"
    echo 'hosts: files' >"$root/etc/nsswitch.conf"
    if absent "$root/bin/sh"; then ln -s bash "$root/bin/sh"; fi
    for applet in $("$root/bin/busybox" --list); do
        if absent "$root/usr/bin/$applet" && absent "$root/usr/sbin/$applet"; then
            ln -s busybox "$root/usr/bin/$applet"
        fi
    done
}

# ------------------------------------------------------ kernel and modules --

# Runs a program of the guest root on the host, with the guest's libraries.
guest_tool() {
    local lib=$work/root/usr/lib/x86_64-linux-gnu tool=$1; shift
    "$lib/ld-linux-x86-64.so.2" --library-path "$lib" "$work/root/usr/bin/$tool" "$@"
}

# Unpacks the kernel image.  QEMU starts an ELF kernel at its PVH entry, which under
# emulation saves the six seconds that the kernel needs to unpack itself.  The header of
# the boot protocol locates the compressed part: setup_sects at 0x1f1, payload_offset
# and payload_length at 0x248 and 0x24c.
unpack_kernel() {
    local image=$1 out=$2 sects off len magic
    field() { od -An -t "u$2" -j "$1" -N "$2" "$image" | tr -d ' '; }
    sects=$(field $((0x1f1)) 1)
    off=$(( (sects + 1) * 512 + $(field $((0x248)) 4) ))
    len=$(( $(field $((0x24c)) 4) - 4 ))    # 4: the unpacked size comes last
    magic=$(od -An -t x1 -j "$off" -N 4 "$image" | tr -d ' ')
    local unpack=false
    case $magic in
        fd377a58) unpack='guest_tool xz -dc' ;;
        28b52ffd) unpack='guest_tool zstd -dc' ;;
        1f8b*)    unpack='gzip -dc' ;;
    esac
    # With any other format, QEMU gets the image as it is.
    if dd if="$image" bs=64K iflag=skip_bytes,count_bytes skip="$off" count="$len" \
            status=none 2>/dev/null | $unpack >"$out" 2>/dev/null &&
        [ "$(head -c 4 "$out" | tr -d '\177')" = ELF ]
    then return 0; fi
    say "using the compressed kernel (payload magic $magic)"
    cp "$image" "$out"
}

# Loaded in this order, each after the modules in its "depends" field.  The carry-less
# multiply versions of crc32 are left out: emulated, they are slower than the table (rxe
# computes a CRC for every packet).
modules="virtio_pci 9pnet_virtio 9p overlay
    crc32_generic veth udp_tunnel rdma_rxe ib_umad rdma_ucm sch_netem"

build_initramfs() {
    say 'unpacking the kernel'
    local tree=$work/ktree init=$work/initramfs bb=$work/root/bin/busybox
    rm -rf "$tree" "$init"
    mkdir -p "$tree" "$init"/{bin,dev,proc,sys,modules,ro,rw,root}
    dpkg-deb --fsys-tarfile "$work"/apt/kernel/*.deb |
        tar -x --no-same-owner -C "$tree" --exclude '*/kernel/sound' \
            --exclude '*/drivers/gpu' --exclude '*/drivers/media' \
            --exclude '*/net/ethernet' --exclude '*/net/wireless'
    unpack_kernel "$tree"/boot/vmlinuz-* "$work/kernel"

    declare -A path=() placed=()
    local file name
    while IFS= read -r file; do
        name=${file##*/}; name=${name%%.ko*}
        path[${name//-/_}]=$file
    done < <(find "$tree" -name '*.ko' -o -name '*.ko.xz')
    find "$tree" -name modules.builtin -exec cat {} + | tr '-' '_' >"$tree/builtin"
    # place NAME: adds the module, after the modules that it needs
    place() {
        local mod=${1//-/_} dep
        [ -z "${placed[$mod]:-}" ] || return 0
        placed[$mod]=1
        if [ -z "${path[$mod]:-}" ]; then
            if grep -q "/$mod\.ko$" "$tree/builtin"; then return 0; fi
            die "kernel module $mod not found in $kernel_pkg"
        fi
        case ${path[$mod]} in
            *.xz) guest_tool xz -dc "${path[$mod]}" ;;
            *)    cat "${path[$mod]}" ;;
        esac >"$init/modules/$mod.ko"
        for dep in $(tr '\0' '\n' <"$init/modules/$mod.ko" |
                     sed -n 's/^depends=//p' | tr ',' ' '); do
            place "$dep"
        done
        echo "$mod" >>"$init/modules/order"
    }
    for name in $modules; do place "$name"; done
    cp "$bb" "$init/bin/busybox"
    guest_init >"$init/init"
    chmod +x "$init/init"
    (cd "$init" && find . | "$bb" cpio -o -H newc 2>/dev/null) >"$work/initrd"
    rm -rf "$tree" "$init"
}

# The guest's init, its only service.
guest_init() {
    cat <<'EOF'
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
stamp() { read -r up _ </proc/uptime; echo "rdma-vm: guest ${up}s $*"; }
fail() { echo "rdma-vm: guest: $*"; poweroff -f; }
p9() { mount -t 9p -o "trans=virtio,version=9p2000.L,msize=512000,$1" "$2" "$3" || fail "cannot mount $2"; }

stamp 'kernel up'
for m in $(cat /modules/order); do insmod "/modules/$m.ko" || fail "cannot load $m"; done
stamp 'modules loaded'

p9 ro,cache=loose root /ro
mount -t tmpfs tmpfs /rw
mkdir /rw/upper /rw/work
mount -t overlay -o lowerdir=/ro,upperdir=/rw/upper,workdir=/rw/work overlay /root || fail 'no overlay'
for d in dev proc sys tmp run; do mkdir -p /root/$d; done
mount --move /dev /root/dev
mkdir -p /root/dev/pts /root/dev/shm
mount -t devpts devpts /root/dev/pts
for d in dev/shm tmp run; do mount -t tmpfs -o mode=1777 tmpfs /root/$d; done
mkdir -p /root/run/rdma-vm
p9 cache=none ctl /root/run/rdma-vm
. /root/run/rdma-vm/config
mkdir -p "/root$hostdir"
p9 cache=mmap host "/root$hostdir"
ln -s /proc/self/fd /root/dev/fd 2>/dev/null

for f in /proc/sys/net/ipv4/conf/all /proc/sys/net/ipv4/conf/default; do
    echo 1 >$f/accept_local
    echo 0 >$f/rp_filter
done
echo 0 >/proc/sys/net/ipv6/conf/default/accept_dad
stamp 'root mounted'
mount --move /proc /root/proc
mount --move /sys /root/sys

in_root() { chroot /root /usr/bin/env PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@"; }
# wire N: sets the names and numbers of the wire
wire() { a=va$1 b=vb$1 net=10.$((77 + $1)).0 mac=02:00:00:00:0$1 out=$((101 + 2 * $1)) back=$((102 + 2 * $1)); }
# paths N: prints the settings that the kernel drops when an end goes down
paths() {
    wire $1
    cat <<-BATCH
	neigh replace $net.2 lladdr $mac:02 dev $a nud permanent
	neigh replace $net.1 lladdr $mac:01 dev $b nud permanent
	route replace $net.2/32 dev $a src $net.1 table $out
	route replace $net.1/32 dev $b src $net.2 table $back
	BATCH
}
{
    echo 'link set lo up'
    for n in 0 1; do
        wire $n
        cat <<-BATCH
	link add $a address $mac:01 mtu 9000 type veth peer name $b address $mac:02 mtu 9000
	addr add $net.1/24 dev $a
	addr add $net.2/24 dev $b
	link set $a up
	link set $b up
	route add unreachable $net.2/32 table $out metric 1000
	route add unreachable $net.1/32 table $back metric 1000
	rule add pref 10 iif $a lookup local
	rule add pref 10 iif $b lookup local
	rule add pref 20 from $net.1 to $net.1 lookup local
	rule add pref 20 from $net.2 to $net.2 lookup local
	rule add pref 30 to $net.2 lookup $out
	rule add pref 30 to $net.1 lookup $back
	BATCH
        paths $n
    done
    echo 'rule add pref 40 lookup local'
    echo 'rule del pref 0'
} | in_root ip -batch - || fail 'no network'
for n in 0 1; do
    wire $n
    printf 'link add rxe%d type rxe netdev %s\n' $((2 * n)) $a $((2 * n + 1)) $b
done >/root/run/rxe
in_root rdma -b /run/rxe || fail 'no rxe'
if [ -n "$netem" ]; then
    for d in va0 vb0 va1 vb1; do in_root tc qdisc add dev $d root netem $netem || fail "netem: $netem"; done
fi
# The addresses of a device become GIDs shortly after it appears.
for d in rxe0/0a4d:0001 rxe1/0a4d:0002 rxe2/0a4e:0001 rxe3/0a4e:0002; do
    for n in $(seq 100); do
        case $(cat /root/sys/class/infiniband/${d%/*}/ports/1/gids/1 2>/dev/null) in
            *${d#*/}) continue 2 ;;
        esac
        usleep 20000
    done
    fail "no GID on ${d%/*}"
done
# Restore the paths of a link that comes up.  The kernel refuses them for a link that is down.
in_root ip -o monitor link | while read -r _; do
    { paths 0; paths 1; } | in_root ip -force -batch - 2>/dev/null
done &
read -r up _ </root/proc/uptime
echo "rdma-vm: guest ${up}s four devices up"
cd /root/run/rdma-vm
: >begun
in_root /bin/bash /run/rdma-vm/command </dev/null >out 2>err
echo $? >status
read -r up _ </root/proc/uptime
echo "rdma-vm: guest ${up}s command done"
poweroff -f
EOF
}

# ------------------------------------------------------------------- setup --

# Built again when the requested packages or this script change.
want="$(cksum <"$0") / $more_pkgs / $kernel_pkg"
exec 9>"$work/lock"
flock 9    # two first runs at once: the second waits for the first's
if [ ! -e "$work/ready" ] || [ "$(cat "$work/ready")" != "$want" ]; then
    rm -f "$work/ready"
    host_tools
    fetch_packages
    build_root
    build_initramfs
    rm -rf "$work/apt"
    printf '%s\n' "$want" >"$work/ready"
    say 'set up'
else
    host_tools
fi
exec 9>&-
[ -z "$setup_only" ] || exit 0

# --------------------------------------------------------------------- run --

root=$work/root
if [ -n "$hostroot" ]; then
    root=/
    { command -v ip && command -v rdma; } >/dev/null || die '-H needs ip and rdma (iproute2) on the host'
fi

ctl=$(mktemp -d "${TMPDIR:-/tmp}/rdma-vm.XXXXXX")
qemu='' tails=()
finish() {
    [ -z "$qemu" ] || kill "$qemu" 2>/dev/null || true
    for t in "${tails[@]}"; do kill "$t" 2>/dev/null || true; done
    rm -rf "$ctl"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

printf 'hostdir=%q\nnetem=%q\n' "$hostdir" "$netem" >"$ctl/config"
{
    echo 'export HOME=/root LANG=C.UTF-8 TERM=dumb RDMA_VM=1'
    echo 'export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin'
    for e in "${envs[@]}"; do printf 'export %q\n' "$e"; done
    # The limits of the command's shell; registered memory counts against -l.
    echo 'ulimit -l unlimited'
    printf 'cd %q || exit 125\n' "$hostdir"
    [ $# -eq 0 ] || { printf 'exec'; printf ' %q' "$@"; echo; }
} >"$ctl/command"
: >"$ctl/out"; : >"$ctl/err"

share() {  # TAG PATH [more]: a directory by 9p
    printf '%s\n' -virtfs "local,mount_tag=$1,path=$2,security_model=none,multidevs=remap${3:-}"
}
start() {  # ACCEL: QEMU in the background, its id in $qemu
    local cpu=host a=$1
    # Hide features that are slow under emulation, because the guest would prefer them.
    if [ "$a" = tcg ]; then a=tcg,thread=multi cpu=max,-erms,-fsrm,-pclmulqdq; fi
    local args=(-M pc -accel "$a" -cpu "$cpu" -smp "$cpus" -m "$mem"
        -nodefaults -no-user-config -display none -no-reboot
        -kernel "$work/kernel" -initrd "$work/initrd"
        -append 'console=ttyS0 quiet panic=-1 tsc=reliable clocksource=tsc nokaslr mitigations=off rcupdate.rcu_expedited=1'
        -serial "file:$ctl/console")
    local shares
    mapfile -t shares < <(share root "$root" ,readonly=on
                          share ctl "$ctl"; share host "$hostdir")
    timeout -k 5 "$limit" qemu-system-x86_64 "${args[@]}" "${shares[@]}" \
        </dev/null >"$ctl/qemu.log" 2>&1 &
    qemu=$!
}

if [ "$accel" = auto ]; then
    accel=tcg
    if [ -w /dev/kvm ]; then
        if [ ! -e "$work/kvm" ]; then
            say 'checking whether a guest boots with kvm'
            echo 'exit 0' >"$ctl/probe"; mv "$ctl/command" "$ctl/kept"; mv "$ctl/probe" "$ctl/command"
            saved=$limit; limit=10; start kvm; limit=$saved
            wait "$qemu" || true
            qemu=''
            if [ "$(cat "$ctl/status" 2>/dev/null)" = 0 ]; then echo kvm; else echo tcg; fi >"$work/kvm"
            rm -f "$ctl/status" "$ctl/console"; mv "$ctl/kept" "$ctl/command"
        fi
        accel=$(cat "$work/kvm")
    fi
fi

# A kernel that dies during boot has run nothing, so it is started again.  Emulation of
# two processors sometimes fails while the kernel patches its own code.
for boot in 1 2 3; do
    say "starting the guest ($accel)"
    start "$accel"
    tail -q -n +1 -s 0.1 -f --pid="$qemu" "$ctl/out" & tails+=($!)
    tail -q -n +1 -s 0.1 -f --pid="$qemu" "$ctl/err" >&2 & tails+=($!)
    rc=0
    wait "$qemu" || rc=$?
    qemu=''
    for t in "${tails[@]}"; do wait "$t" || true; done
    tails=()
    say 'guest ended'
    [ -z "$verbose" ] || cat "$ctl/console" >&2

    if [ -s "$ctl/status" ]; then exit "$(cat "$ctl/status")"; fi
    if [ "$rc" = 124 ] || [ "$rc" = 137 ]; then
        echo "rdma-vm: stopped after $limit seconds" >&2
        exit 124
    fi
    cat "$ctl/qemu.log" >&2
    tail -n 40 "$ctl/console" >&2 2>/dev/null || true
    [ ! -e "$ctl/begun" ] || break
    echo "rdma-vm: the guest died during boot (attempt $boot of 3)" >&2
    rm -f "$ctl/console"
done
die "the guest ended before the command (qemu exit status $rc)"
