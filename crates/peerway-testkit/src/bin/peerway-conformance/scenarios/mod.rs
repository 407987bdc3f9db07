//! The scenarios, in the order in which they run.

mod byte_counters;
mod cancel;
mod connect;
mod descriptors;
mod driven;
mod fair;
mod fork;
mod frames;
mod garbage;
mod half_open;
mod hostile;
mod idle;
mod incast;
mod kill;
mod lanes;
mod leaks;
mod limits;
mod messages;
mod namespaces;
mod no_descriptors;
mod notes;
mod other_user;
mod posting;
mod quarantine;
mod rails;
mod recycled;
mod refusals;
mod restart;
mod revoke;
mod rights;
mod shapes;
mod signals;
mod slow_handshake;
mod sparse;
mod staged;
mod states;
mod stop;
mod strangers;
mod threads;

use anyhow::Result;
use peerway::DataProtection;

use crate::world::{Transport, Verdict, World};

pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    /// `Err` says why the scenario does not apply to a transport.
    pub(crate) applies: fn(Transport) -> std::result::Result<(), &'static str>,
    pub(crate) run: fn(&World) -> Result<Verdict>,
    /// The scenario hangs if it runs longer than this many times the profile's limit.
    pub(crate) patience: u32,
}

impl Scenario {
    /// Whether the scenario measures the machine and must therefore run alone.
    pub(crate) fn is_alone(&self) -> bool {
        matches!(self.name, "posting" | "idle" | "incast" | "rails" | "stop-short")
    }

    /// Whether the scenario is part of the usual run on a transport. With protected data, only
    /// those run that depend on how bytes travel; `--only` names others.
    pub(crate) fn is_usual_on(&self, transport: Transport) -> bool {
        const PROTECTED: &[&str] = &[
            "shapes-lanes",
            "connect",
            "notes-follow-bytes",
            "rights",
            "kill-target",
            "stop-target-write",
            "stop-reader-revoke",
            "cancel-write",
            "cancel-read",
            "revoke-write",
            "revoke-mid-frame",
            "cancel-read-mid-frame",
            "lane-lost",
            "lane-lost-read",
            "lane-lost-note",
            "lanes-all-lost",
            "slow-peer",
            "threads",
        ];
        transport.data() == DataProtection::Off || PROTECTED.contains(&self.name)
    }
}

macro_rules! scenarios {
    ($($name:literal, $about:literal, $applies:ident, $run:path, $patience:literal;)*) => {
        &[$(Scenario {
            name: $name, about: $about, applies: $applies, run: $run, patience: $patience,
        }),*]
    };
}

pub(crate) const ALL: &[Scenario] = scenarios! {
    "shapes", "ranges, vectors and block lists of many sizes, both ways", always, shapes::run, 1;
    "shapes-lanes", "the same over several bulk lanes", tcp_only, shapes::lanes, 1;
    "connect", "one session between two endpoints, whichever side opens it", always, connect::run, 1;
    "bad-work", "invalid work is refused when it is built", always, shapes::bad_work, 1;
    "notes-follow-bytes", "notifications and counters follow the bytes, exactly once", always, notes::follow, 1;
    "notes-full-queue", "a full notification queue refuses with a typed error", always, notes::full, 1;
    "byte-counters", "both sides count the bytes of every path", always, byte_counters::run, 1;
    "rights", "tokens, directions, bindings, generations and ranges are enforced", always, rights::run, 1;
    "rights-lanes", "the owner refuses false requests of a peer on its lanes", tcp_only, rights::liar, 1;
    "kill-target", "the target is killed in mid-transfer", processes, kill::target, 1;
    "kill-initiator", "the initiator is killed in mid-transfer", processes, kill::initiator, 1;
    "stop-target-write", "the target of a write stops and resumes", processes, stop::target_write, 1;
    "stop-target-read", "the target of a read stops and resumes", processes, stop::target_read, 1;
    "stop-short", "a stop shorter than the detection time", processes, stop::short, 1;
    "stop-initiator-revoke", "the initiator stops inside a copy; the owner revokes", processes, stop::initiator_revoke, 1;
    "stop-reader-revoke", "a reader stops with its socket full; the owner revokes", framed, stop::reader_revoke, 1;
    "quarantine-endpoint", "memory that a stopped writer may write outlives its endpoint", stopped_writers, quarantine::outlives_endpoint, 1;
    "quarantine-region", "the same for a region that is dropped without a revoke; its writer dies", stopped_writers, quarantine::outlives_region, 1;
    "quarantine-source", "the source of a write that a stopped owner pulls outlives its endpoint", cma_only, quarantine::source_outlives_endpoint, 1;
    "revoke-again", "a second revoke, and one without the endpoint, report the true fence", stopped_writers, quarantine::revoke_again, 1;
    "recycled-number", "another process gets the process number of a dead peer", cma_only, recycled::run, 1;
    "cut-descriptors", "a descriptor cannot be received; the session and its fences survive", cma_only, descriptors::cut_message, 1;
    "stopped-target-is-reached", "paths that do not need the peer's processor reach a stopped peer", processes, stop::reached, 1;
    "deadline", "a transfer to a stopped target ends by its deadline", processes, stop::deadline, 1;
    "cancel-write", "a write is cancelled in flight", always, cancel::write, 1;
    "cancel-read", "a read is cancelled in flight", always, cancel::read, 1;
    "cancel-stopped-copier", "a write is cancelled while its copier is stopped between check and copy", processes, cancel::stopped_copier, 1;
    "cancel-parked-copier", "a transfer is cancelled while a local copier is parked", always, cancel::parked_copier, 1;
    "revoke-write", "the owner revokes under a write in flight", always, revoke::write, 1;
    "revoke-read", "the owner revokes under a read in flight", always, revoke::read, 1;
    "revoke-many", "revoke and advertise over and over while a peer writes", always, revoke::many, 1;
    "revoke-mid-frame", "the owner revokes in the middle of a frame", always, frames::revoke, 1;
    "cancel-read-mid-frame", "a read is cancelled in the middle of a frame", always, frames::cancel_read, 1;
    "sparse-5gib", "a region of 5 GiB, around its 4 GiB border", no_device, sparse::run, 1;
    "garbage-handshake", "invalid data in every state of the handshake", always, garbage::handshake, 1;
    "garbage-session", "invalid data on an open session", always, garbage::session, 1;
    "garbage-silence", "silent connections are dropped", always, garbage::silence, 1;
    "garbage-local", "invalid data on the local socket", local, garbage::local_socket, 1;
    "other-user", "another user takes no place at the local socket", local, other_user::run, 1;
    "stranger-signals", "floods of counts and notifications do not make an honest peer fail", tcp_only, signals::run, 1;
    "stranger-messages", "half-sent messages hold bounded memory for a bounded time", tcp_only, messages::run, 1;
    "stranger-limits", "handshakes, sessions, lanes and descriptors have limits", tcp_only, limits::run, 1;
    "stranger-states", "every message in every state of a connection, at several rates", tcp_only, states::run, 1;
    "stranger-refusals", "each limit refuses under its own reason and releases what it held", tcp_only, refusals::run, 1;
    "no-descriptors", "a process without free descriptors stays idle, and recovers", processes, no_descriptors::run, 1;
    "half-open", "half-open connections make room for a new peer", always, half_open::run, 1;
    "connect-deadline", "a connect keeps its time-out however slowly the peer answers", always, slow_handshake::run, 2;
    "strangers", "other protocols, dead addresses, other versions, bad metadata", always, strangers::run, 1;
    "lane-lost", "a lane dies between data and acknowledgement", tcp_only, lanes::lost, 1;
    "lane-lost-read", "a lane dies under a read", tcp_only, lanes::lost_read, 1;
    "lane-lost-note", "the lane of a notification dies before the acknowledgement", tcp_only, lanes::lost_note, 1;
    "lanes-all-lost", "every lane dies while the target is stopped with bytes in its sockets", tcp_only, lanes::all_lost, 1;
    "lane-stalled", "a lane swallows bytes and delivers them later", tcp_only, lanes::stalled, 1;
    "unplugged", "no byte passes, and later all of them do", tcp_only, lanes::unplugged, 1;
    "restart", "a peer restarts on the same port", processes, restart::run, 1;
    "incast", "many peers write at once", always, incast::run, 2;
    "slow-peer", "a peer that reads slowly or not at all does not delay others", processes, fair::slow, 1;
    "threads", "eight threads post, wait and cancel on one endpoint", always, threads::run, 1;
    "fork", "a forked child cannot use the endpoint and does not disturb it", always, fork::run, 1;
    "leaks", "connect, transfer, remove, many times, leaks nothing", always, leaks::run, 4;
    "idle", "an idle endpoint uses no processor", always, idle::run, 1;
    "posting", "posting returns quickly at any size", always, posting::run, 1;
    "hostile-segment", "a peer overwrites the shared segment", local, hostile::run, 1;
    "namespaces", "a peer in its own PID, mount, IPC or network namespaces", processes, namespaces::run, 1;
    "netns-tcp", "a peer in another network namespace, over a link", tcp_only, rails::netns, 1;
    "rails", "two links share a transfer, and one goes down under it", tcp_only, rails::run, 2;
    "driven-puts", "commands from rings: bytes, then their counts, quiet", always, driven::puts, 1;
    "driven-quiet", "quiet waits for a stopped peer, and for no other", processes, driven::quiet, 1;
    "driven-kill", "the remote process is killed while a kernel waits", processes, driven::kill, 1;
    "driven-bad-commands", "invalid commands fail alone", always, driven::bad_commands, 1;
    "staged", "stages, classes, deadlines and the future", always, staged::run, 1;
};

fn always(_: Transport) -> std::result::Result<(), &'static str> {
    Ok(())
}

fn no_device(transport: Transport) -> std::result::Result<(), &'static str> {
    if transport.is_device() {
        return Err("devices pin the whole region, which may exceed the memory of this machine");
    }
    Ok(())
}

fn processes(transport: Transport) -> std::result::Result<(), &'static str> {
    match transport {
        Transport::SameProcess => Err("this path has only one process"),
        _ => Ok(()),
    }
}

fn tcp_only(transport: Transport) -> std::result::Result<(), &'static str> {
    match transport {
        tcp if tcp.is_tcp() => Ok(()),
        _ => Err("tests TCP lanes"),
    }
}

fn framed(transport: Transport) -> std::result::Result<(), &'static str> {
    if transport.is_framed() { Ok(()) } else { Err("this path sends no read data in frames") }
}

fn cma_only(transport: Transport) -> std::result::Result<(), &'static str> {
    match transport {
        Transport::LocalCma => Ok(()),
        _ => Err("tests copies between processes by the kernel (CMA)"),
    }
}

fn stopped_writers(transport: Transport) -> std::result::Result<(), &'static str> {
    match transport {
        Transport::LocalMap | Transport::LocalCma => Ok(()),
        Transport::SameProcess => Err("this path has only one process"),
        _ => Err("the owner or its device copies, not the writer"),
    }
}

fn local(transport: Transport) -> std::result::Result<(), &'static str> {
    match transport {
        Transport::LocalMap | Transport::LocalCma | Transport::LocalRing => Ok(()),
        _ => Err("tests the segment that two local processes share"),
    }
}
