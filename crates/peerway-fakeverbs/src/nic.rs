//! The thread that emulates the NIC of an open device, and the state that it shares with callers.
//!
//! Invariants:
//! - One lock protects all queue pairs and regions. A thread holds it for one packet or one post at
//!   a time.
//! - Callers come first: the lock is not fair, so the thread checks after every packet whether a
//!   caller waits.
//! - The thread announces under the lock that it goes to sleep. A caller that adds work checks this
//!   under the lock, so no work waits for a sleeping thread.
//! - With nothing to do, the thread blocks in epoll without a time-out.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use peerway_sys::verbs::ffi::*;
use rustix::event::{EventfdFlags, epoll, eventfd};

use crate::cq::{CqShared, Put};
use crate::device::Device;
use crate::events::{Event, EventPipe};
use crate::lock;
use crate::memory::Regions;
use crate::qp::Qp;
use crate::wire::{Header, PAYLOAD, Wire};

/// The epoll data of the wake descriptor, which is no queue pair's number.
const WAKE: u64 = u64::MAX;

/// Packets taken from one socket before the other sockets get their turn.
const TURN: usize = 16;

/// An open device.
pub(crate) struct Nic {
    pub(crate) device: &'static Device,
    /// Asynchronous events, for the program.
    pub(crate) events: EventPipe,
    /// The completion queues that asynchronous events may name.
    pub(crate) cqs: Mutex<HashMap<u64, Arc<CqShared>>>,
    pub(crate) epoll: OwnedFd,
    wake: OwnedFd,
    state: Mutex<State>,
    /// Number of callers that wait for the lock.
    waiting: AtomicUsize,
    ids: AtomicU64,
    stopping: AtomicBool,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// The state that the lock protects.
pub(crate) struct State {
    pub(crate) qps: HashMap<u32, Qp>,
    pub(crate) regions: Regions,
    pub(crate) wire: Wire,
    /// Queue pairs that have work or wait for a time.
    active: Vec<u32>,
    /// Completion queues that hold late completions.
    late: Vec<Arc<CqShared>>,
    asleep: bool,
    /// How many times callers have added work.
    calls: u64,
    /// The program has received the event that the device is gone.
    gone: bool,
    /// The program has received all changes of the link up to this time.
    link_told: Instant,
}

/// The parts of a device that a queue pair needs for its work.
pub(crate) struct Env<'a> {
    pub(crate) nic: &'a Nic,
    pub(crate) regions: &'a mut Regions,
    pub(crate) wire: &'a mut Wire,
    pub(crate) now: Instant,
    late: &'a mut Vec<Arc<CqShared>>,
}

impl Nic {
    pub(crate) fn start(device: &'static Device) -> io::Result<Arc<Self>> {
        static OPENED: AtomicU64 = AtomicU64::new(0);
        // Contexts of one process use different random sequences, which are the same in every run.
        let opened = OPENED.fetch_add(1, Ordering::Relaxed);
        let seed = device.fabric.script.seed ^ (opened << 32);
        let state = State {
            qps: HashMap::new(),
            regions: Regions::until(device.fabric.script.die),
            wire: Wire::new(device, seed),
            active: Vec::new(),
            late: Vec::new(),
            asleep: false,
            calls: 0,
            gone: false,
            link_told: Instant::now(),
        };
        let nic = Self {
            device,
            events: EventPipe::new()?,
            cqs: Mutex::default(),
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            state: Mutex::new(state),
            waiting: AtomicUsize::new(0),
            ids: AtomicU64::new(1),
            stopping: AtomicBool::new(false),
            thread: Mutex::default(),
        };
        let data = epoll::EventData::new_u64(WAKE);
        epoll::add(&nic.epoll, &nic.wake, data, epoll::EventFlags::IN)?;
        let nic = Arc::new(nic);
        let theirs = Arc::clone(&nic);
        let name = format!("fakeverbs{}", device.index);
        let thread = std::thread::Builder::new().name(name).spawn(move || theirs.run())?;
        *lock(&nic.thread) = Some(thread);
        lock(all()).push(Arc::clone(&nic));
        Ok(nic)
    }

    /// Ends the device's thread.
    pub(crate) fn stop(self: &Arc<Self>) {
        lock(all()).retain(|nic| !Arc::ptr_eq(nic, self));
        self.stopping.store(true, Ordering::Release);
        self.ring();
        if let Some(thread) = lock(&self.thread).take() {
            // A panic of the thread has already aborted the process; see `Loud`.
            let _ = thread.join();
        }
    }

    /// Takes the lock for a caller, ahead of the device's thread.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let guard = lock(&self.state);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        guard
    }

    pub(crate) fn next_id(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn wake_fd(&self) -> RawFd {
        self.wake.as_raw_fd()
    }

    /// Schedules the queue pair for work. The caller holds the lock.
    pub(crate) fn activate(&self, state: &mut State, number: u32) {
        let State { qps, active, asleep, calls, .. } = state;
        *calls += 1;
        let Some(qp) = qps.get_mut(&number) else { return };
        if !std::mem::replace(&mut qp.active, true) {
            active.push(number);
        }
        if std::mem::replace(asleep, false) {
            self.ring();
        }
    }

    fn ring(&self) {
        // A full eventfd is already readable.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn run(&self) {
        let _loud = Loud;
        let mut packet = Vec::with_capacity(Header::SIZE + PAYLOAD);
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 64];
        let mut due = self.turn();
        while !self.stopping.load(Ordering::Acquire) {
            let wait = due.map(|due| due.saturating_duration_since(Instant::now()));
            let count = match self.wait(&mut events, wait) {
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
                Err(error) => panic!("epoll: {error}"),
            };
            for event in &events[..count] {
                match event.u64 {
                    WAKE => {
                        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
                    }
                    number => self.receive(number as u32, &mut packet),
                }
            }
            due = self.turn();
        }
    }

    /// Blocks until an event arrives or the time is over. It uses epoll_pwait2, because timers here
    /// last microseconds. Without that call they are rounded up to milliseconds.
    fn wait(&self, events: &mut [libc::epoll_event], wait: Option<Duration>) -> io::Result<usize> {
        let (fd, room) = (self.epoll.as_raw_fd(), events.len() as i32);
        let time = wait.map(|wait| libc::timespec {
            tv_sec: wait.as_secs().cast_signed(),
            tv_nsec: wait.subsec_nanos().into(),
        });
        let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let mask = std::ptr::null::<libc::sigset_t>();
        // SAFETY: `events` has `room` entries, and `time` outlives the call.
        let mut count = unsafe {
            libc::syscall(libc::SYS_epoll_pwait2, fd, events.as_mut_ptr(), room, time, mask, 8)
        };
        if count < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ENOSYS) {
            let round_up = |wait: Duration| wait.as_micros().div_ceil(1000) as i32;
            let time = wait.map_or(-1, round_up);
            // SAFETY: `events` has `room` entries.
            count = unsafe { libc::epoll_wait(fd, events.as_mut_ptr(), room, time) }.into();
        }
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }

    /// Receives packets of one queue pair.
    fn receive(&self, number: u32, packet: &mut Vec<u8>) {
        packet.resize(Header::SIZE + PAYLOAD, 0);
        for _ in 0..TURN {
            self.let_callers_pass();
            let mut state = lock(&self.state);
            let (mut env, qps, active) = state.split(self);
            let Some(qp) = qps.get_mut(&number) else { return };
            let Ok(count) = qp.socket.recv(packet) else { return };
            if let Some((header, payload)) = Header::parse(&packet[..count]) {
                qp.packet(&mut env, &header, payload);
            }
            if !std::mem::replace(&mut qp.active, true) {
                active.push(number);
            }
        }
    }

    /// Does everything that is not a packet: sends, checks the timers, and returns when the next
    /// timer is due.
    fn turn(&self) -> Option<Instant> {
        self.let_callers_pass();
        let mut state = lock(&self.state);
        state.asleep = false;
        let calls = state.calls;
        let now = Instant::now();
        let mut due = self.device_events(&mut state, now);
        let mut sooner = |at: Option<Instant>| {
            due = [due, at].into_iter().flatten().min();
        };
        let turn = std::mem::take(&mut state.active);
        for number in turn {
            if self.waiting.load(Ordering::Relaxed) > 0 {
                drop(state);
                self.let_callers_pass();
                state = lock(&self.state);
            }
            let (mut env, qps, active) = state.split(self);
            let Some(qp) = qps.get_mut(&number) else { continue };
            qp.active = false;
            if let Some(at) = qp.work(&mut env) {
                qp.active = true;
                active.push(number);
                sooner(Some(at));
            }
        }
        sooner(state.wire.release(now));
        let mut late = std::mem::take(&mut state.late);
        late.retain(|cq| {
            let next = cq.release(now);
            sooner(next);
            next.is_some()
        });
        state.late.append(&mut late);
        // A caller may have added work in between and seen this thread awake.
        if state.calls != calls {
            return Some(now);
        }
        state.asleep = true;
        due
    }

    /// Handles removal of the device and changes of its link.
    fn device_events(&self, state: &mut State, now: Instant) -> Option<Instant> {
        if self.device.is_removed() && !state.gone {
            state.gone = true;
            self.events.put(Event { kind: IBV_EVENT_DEVICE_FATAL, port: 0, id: 0 });
            let numbers: Vec<u32> = state.qps.keys().copied().collect();
            for number in numbers {
                let (mut env, qps, _) = state.split(self);
                if let Some(qp) = qps.get_mut(&number) {
                    qp.fail(&mut env);
                }
            }
        }
        while let Some((moment, down)) = self.device.link_change_after(state.link_told) {
            if moment > now {
                return Some(moment);
            }
            state.link_told = moment;
            let kind = if down { IBV_EVENT_PORT_ERR } else { IBV_EVENT_PORT_ACTIVE };
            self.events.put(Event { kind, port: 1, id: 0 });
        }
        None
    }

    fn let_callers_pass(&self) {
        for _ in 0..100 {
            if self.waiting.load(Ordering::Relaxed) == 0 {
                return;
            }
            std::thread::yield_now();
        }
    }
}

/// Aborts the process when the device's thread panics. Otherwise a program that waits for the dead
/// device would hang.
struct Loud;

impl Drop for Loud {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

/// Wakes every context of a device that was removed.
pub(crate) fn wake_all(device: &Device) {
    for nic in lock(all()).iter().filter(|nic| nic.device.index == device.index) {
        nic.ring();
    }
}

fn all() -> &'static Mutex<Vec<Arc<Nic>>> {
    static ALL: Mutex<Vec<Arc<Nic>>> = Mutex::new(Vec::new());
    &ALL
}

impl State {
    /// The parts that a queue pair needs for its work, the queue pairs, and the list of active
    /// ones.
    pub(crate) fn split<'a>(
        &'a mut self,
        nic: &'a Nic,
    ) -> (Env<'a>, &'a mut HashMap<u32, Qp>, &'a mut Vec<u32>) {
        let Self { qps, regions, wire, active, late, .. } = self;
        (Env { nic, regions, wire, now: Instant::now(), late }, qps, active)
    }

    /// Removes a queue pair from the list of active ones.
    pub(crate) fn forget(&mut self, number: u32) {
        self.active.retain(|active| *active != number);
    }
}

impl Env<'_> {
    /// Puts a completion into its queue, now or late.
    pub(crate) fn complete(&mut self, cq: &Arc<CqShared>, wc: ibv_wc, solicited: bool) {
        let script = &self.nic.device.fabric.script;
        let late = self.wire.dice.hit(script.late).then(|| self.now + script.delay);
        match cq.put(wc, solicited, late) {
            Put::Done => {}
            Put::Late => {
                if !self.late.iter().any(|other| Arc::ptr_eq(other, cq)) {
                    self.late.push(Arc::clone(cq));
                }
            }
            Put::Overrun => {
                self.nic.events.put(Event { kind: IBV_EVENT_CQ_ERR, port: 0, id: cq.id });
            }
        }
    }
}
