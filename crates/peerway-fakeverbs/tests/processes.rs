//! Two processes, one of which may die, and the cost of an idle one.

mod support;

use std::io::{BufReader, Read as _, Write as _};
use std::process::{Child, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use peerway_sys::verbs::ffi::*;

use support::*;

const LEN: usize = 1 << 20;

/// The address that one side tells the other.
struct Address {
    gid: [u8; 16],
    number: u32,
    memory: u64,
    key: u32,
}

impl Address {
    fn line(&self) -> String {
        let gid = u128::from_be_bytes(self.gid);
        format!("@ {gid} {} {} {}\n", self.number, self.memory, self.key)
    }

    /// Reads the first line that is an address. Test harnesses also print other lines.
    fn read(from: &mut impl std::io::BufRead) -> Self {
        let mut line = String::new();
        let at = loop {
            line.clear();
            assert!(
                from.read_line(&mut line).expect("the output can be read") > 0,
                "no address came"
            );
            if let Some(at) = line.find("@ ") {
                break at;
            }
        };
        let mut words = line[at + 2..].split_whitespace().map(|word| word.parse::<u128>());
        let mut next = || words.next().expect("the address has four words").expect("a number");
        let gid = next().to_be_bytes();
        Self { gid, number: next() as u32, memory: next() as u64, key: next() as u32 }
    }
}

/// The remote process: it connects to the address that it reads, and echoes as many bytes as
/// requested.
fn serve() {
    let node = Node::new("fake1");
    let (inbox, qp) = (node.buffer(LEN), node.qp(64));
    let ours = Address {
        gid: node.gid(),
        number: qp.number(),
        memory: inbox.address(0),
        key: inbox.mr.rkey(),
    };
    print!("{}", ours.line());
    std::io::stdout().flush().expect("the other side reads");
    let mut input = BufReader::new(std::io::stdin());
    let theirs = Address::read(&mut input);
    // The other side may write as soon as this side is ready to receive.
    node.connect(&qp, theirs.gid, theirs.number);
    for id in 0..8 {
        receive(&qp, id, &[]);
    }
    print!("{}", ours.line());
    std::io::stdout().flush().expect("the other side reads");
    // Each immediate asks for that many bytes back.
    while let Some(wc) = arrived(&node) {
        if wc.is_receive() && wc.status().is_success() {
            let len = wc.immediate().expect("the completion has an immediate") as usize;
            receive(&qp, 0, &[]);
            let piece = [inbox.sge(0, len)];
            post(
                &qp,
                &mut [ibv_send_wr::write_with_immediate(
                    1,
                    &piece,
                    theirs.memory,
                    theirs.key,
                    wc.imm_data,
                )],
            );
        }
    }
    let mut rest = Vec::new();
    let _ = input.read_to_end(&mut rest);
}

/// Waits for a completion, at most for the watchdog's time.
fn arrived(node: &Node) -> Option<ibv_wc> {
    let begun = Instant::now();
    let mut into = [ibv_wc::zeroed()];
    while begun.elapsed() < WATCHDOG {
        if node.cq.poll(&mut into).expect("the queue can be polled") > 0 {
            return Some(into[0]);
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    None
}

struct Far {
    process: Killed,
    output: BufReader<ChildStdout>,
}

impl Far {
    fn start(test: &str) -> Self {
        let script = std::env::var("PEERWAY_FAKE_VERBS").unwrap_or_default();
        let mut command = child(test, &script, "far");
        let mut process: Child =
            command.stdout(Stdio::piped()).spawn().expect("the test program starts again");
        let output = BufReader::new(process.stdout.take().expect("the child has a pipe"));
        Self { process: Killed(process), output }
    }

    /// Stops the process and waits until all its threads have stopped. Returns its number.
    fn stop(&self) -> i32 {
        let process = self.process.0.id() as i32;
        // SAFETY: kill takes no pointers, and this process started the other one.
        assert_eq!(unsafe { libc::kill(process, libc::SIGSTOP) }, 0);
        let mut status = 0;
        // SAFETY: `status` is valid. The call returns when all threads have stopped.
        assert_eq!(unsafe { libc::waitpid(process, &mut status, libc::WUNTRACED) }, process);
        process
    }

    fn write(&mut self, address: &Address) {
        let input = self.process.0.stdin.as_mut().expect("the child has a pipe");
        input.write_all(address.line().as_bytes()).expect("the other side reads");
    }
}

/// Runs `near` against another process. Both use the same script.
fn with_peer(test: &str, script: &str, near: impl FnOnce(Near)) {
    if !scripted(test, script) {
        return;
    }
    if role() == "far" {
        serve();
        return;
    }
    let mut far = Far::start(test);
    let node = Node::new("fake0");
    let (memory, qp) = (node.buffer(LEN), node.qp(64));
    let theirs = Address::read(&mut far.output);
    node.connect(&qp, theirs.gid, theirs.number);
    let ours = Address {
        gid: node.gid(),
        number: qp.number(),
        memory: memory.address(0),
        key: memory.mr.rkey(),
    };
    far.write(&ours);
    // The second address says that the remote process is connected.
    let theirs = Address::read(&mut far.output);
    near(Near { far, node, memory, qp, theirs });
}

struct Near {
    far: Far,
    node: Node,
    memory: Buffer,
    qp: peerway_sys::verbs::Qp,
    theirs: Address,
}

impl Near {
    fn echo(&self, rounds: usize) {
        let from = self.node.buffer(LEN);
        for round in 0..rounds {
            let seed = round as u8;
            from.pattern(seed);
            let len = 1 + (round * 65_537) % LEN;
            receive(&self.qp, 7, &[]);
            let piece = [from.sge(0, len)];
            let write = ibv_send_wr::write_with_immediate(
                1,
                &piece,
                self.theirs.memory,
                self.theirs.key,
                len as u32,
            );
            post(&self.qp, &mut [write.with_flags(SIGNALED)]);
            self.node.completions(2);
            assert!(self.memory.has_pattern(seed, 0, len));
        }
    }
}

#[test]
fn two_processes_write_to_each_other() {
    with_peer("two_processes_write_to_each_other", "", |near| {
        near.echo(30);
        let piece = [near.memory.sge(0, LEN)];
        let read = ibv_send_wr::read(2, &piece, near.theirs.memory, near.theirs.key);
        post(&near.qp, &mut [read.with_flags(SIGNALED)]);
        near.node.completions(1);
    });
}

#[test]
fn two_processes_on_a_bad_fabric() {
    let script = "seed=11,drop=2%,reorder=10%,rnr=5%,late=10%,delay=500us";
    with_peer("two_processes_on_a_bad_fabric", script, |near| near.echo(10));
}

#[test]
fn a_killed_peer_is_retry_exceeded() {
    with_peer("a_killed_peer_is_retry_exceeded", "patience=1000s", |mut near| {
        near.echo(2);
        near.far.process.0.kill().expect("the peer runs");
        near.far.process.0.wait().expect("the peer ended");
        let piece = [near.memory.sge(0, 64)];
        let begun = Instant::now();
        for id in 0..3 {
            let write = ibv_send_wr::write(id, &piece, near.theirs.memory, near.theirs.key);
            post(&near.qp, &mut [write]);
        }
        let first = near.node.completion();
        assert_eq!((first.wr_id, first.status), (0, IBV_WC_RETRY_EXC_ERR), "{}", first.status());
        // Eight time-outs of 17 ms: the script's patience is only for peers that exist.
        assert!(begun.elapsed() > Duration::from_millis(100), "{:?}", begun.elapsed());
        assert!(near.node.completion().status().is_flushed());
        assert!(near.node.completion().status().is_flushed());
        assert_eq!(state(&near.qp), IBV_QPS_ERR);
    });
}

#[test]
fn a_peer_that_dies_in_the_middle_is_retry_exceeded() {
    with_peer("a_peer_that_dies_in_the_middle_is_retry_exceeded", "", |mut near| {
        let piece = [near.memory.sge(0, LEN)];
        for id in 0..16 {
            let write = ibv_send_wr::write(id, &piece, near.theirs.memory, near.theirs.key);
            post(&near.qp, &mut [write.with_flags(SIGNALED)]);
        }
        near.node.completions(1);
        near.far.stop();
        // All sixteen writes may have completed. The peer dies before it can acknowledge this one.
        let write = ibv_send_wr::write(16, &piece, near.theirs.memory, near.theirs.key);
        post(&near.qp, &mut [write.with_flags(SIGNALED)]);
        near.far.process.0.kill().expect("the peer runs");
        let statuses: Vec<u32> = (1..17).map(|_| near.node.completion().status).collect();
        let failed = statuses.iter().position(|status| *status != IBV_WC_SUCCESS);
        let at = failed.expect("the last write fails");
        assert_eq!(statuses[at], IBV_WC_RETRY_EXC_ERR);
        assert!(statuses[at + 1..].iter().all(|status| *status == IBV_WC_WR_FLUSH_ERR));
    });
}

#[test]
fn a_stopped_peer_is_waited_for() {
    with_peer("a_stopped_peer_is_waited_for", "", |near| {
        near.echo(1);
        let process = near.far.stop();
        let piece = [near.memory.sge(0, LEN)];
        let write = ibv_send_wr::write(1, &piece, near.theirs.memory, near.theirs.key);
        post(&near.qp, &mut [write.with_flags(SIGNALED)]);
        // Many times the time-out of the queue pair. A real device would answer by itself.
        near.node.nothing_comes(Duration::from_millis(700));
        // SAFETY: kill takes no pointers, and the process is not reaped.
        assert_eq!(unsafe { libc::kill(process, libc::SIGCONT) }, 0);
        near.node.completions(1);
        near.echo(1);
    });
}

#[test]
fn an_idle_device_costs_nothing() {
    with_peer("an_idle_device_costs_nothing", "", |near| {
        near.echo(1);
        let busy = || {
            let mut usage: libc::rusage = empty();
            // SAFETY: `usage` is valid, and the call fills it.
            assert_eq!(unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut usage) }, 0);
            let time = |time: libc::timeval| {
                Duration::from_secs(time.tv_sec as u64) + Duration::from_micros(time.tv_usec as u64)
            };
            (time(usage.ru_utime) + time(usage.ru_stime), usage.ru_nvcsw)
        };
        let begun = Instant::now();
        loop {
            let (before, switches) = busy();
            std::thread::sleep(Duration::from_secs(1));
            let (after, woken) = busy();
            // This thread slept once. A polling device would wake hundreds of times per second.
            if after - before < Duration::from_millis(50) && woken - switches < 20 {
                break;
            }
            let (used, woken) = (after - before, woken - switches);
            assert!(begun.elapsed() < WATCHDOG, "{used:?} in a second, woken {woken} times");
        }
    });
}

fn empty() -> libc::rusage {
    // SAFETY: an rusage consists of integers, for which zero is valid.
    unsafe { std::mem::zeroed() }
}
