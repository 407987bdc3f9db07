//! The poller over loom's atomics: every order of events that the memory model allows.
//!
//! `cargo xtask test --only loom`. Each test runs the whole loop of the progress thread beside a
//! peer, a posting thread or a waiter. Each rule of the module has a test that leaves it out and
//! must deadlock.

// Not loom's, which panics when it is dropped after a deadlock.
use std::sync::Arc;

use ::loom::cell::Cell;
use ::loom::model::Builder;
use ::loom::sync::atomic::{AtomicU32, Ordering, fence};
use ::loom::sync::{Condvar, Mutex};
use ::loom::thread;

use super::*;

/// An event source as a mapped ring has it: messages, and whether the owner wants an event for the
/// next.
struct Source {
    sent: AtomicU32,
    armed: AtomicU32,
}

/// What the kernel does: an event descriptor of the source, and the wake descriptor.
#[derive(Default)]
struct Kernel {
    descriptors: Mutex<Descriptors>,
    changed: Condvar,
}

#[derive(Default)]
struct Descriptors {
    source: bool,
    wake: bool,
    resume: bool,
}

impl Kernel {
    fn signal(&self, set: impl FnOnce(&mut Descriptors)) {
        set(&mut self.descriptors.lock().unwrap());
        self.changed.notify_all();
    }

    /// Blocks until `take` takes something. A reader that was faster leaves it blocked.
    fn wait(&self, take: impl Fn(&mut Descriptors) -> bool) {
        let mut descriptors = self.descriptors.lock().unwrap();
        while !take(&mut descriptors) {
            descriptors = self.changed.wait(descriptors).unwrap();
        }
    }
}

struct ModelEvents {
    kernel: Arc<Kernel>,
    /// Pauses up to this long end by themselves. Only a `resume` ends longer ones.
    timed: Duration,
}

impl Events for ModelEvents {
    fn wait(&self, timeout: Option<Duration>) {
        assert_eq!(timeout, None, "the model has no timers");
        self.kernel.wait(|descriptors| std::mem::take(&mut descriptors.wake) || descriptors.source);
    }

    fn notify(&self) {
        self.kernel.signal(|descriptors| descriptors.wake = true);
    }

    fn pause(&self, timeout: Duration) {
        if timeout <= self.timed {
            thread::yield_now();
        } else {
            self.kernel.wait(|descriptors| std::mem::take(&mut descriptors.resume));
        }
    }

    fn resume(&self) {
        self.kernel.signal(|descriptors| descriptors.resume = true);
    }
}

/// A driver with one source and something to send.
struct ModelDriver {
    source: Arc<Source>,
    kernel: Arc<Kernel>,
    /// Cells are watched for races.
    received: Cell<u32>,
    to_send: Cell<u32>,
    unarmed: bool,
    ends: Arc<Ends>,
}

/// What waiters block on: messages received and commands sent.
#[derive(Default)]
struct Ends {
    count: Mutex<u32>,
    changed: Condvar,
}

impl Ends {
    fn add(&self, more: u32) {
        *self.count.lock().unwrap() += more;
        self.changed.notify_all();
    }

    fn is(&self, count: u32) -> bool {
        *self.count.lock().unwrap() >= count
    }

    fn wait_for(&self, count: u32) {
        let mut now = self.count.lock().unwrap();
        while *now < count {
            now = self.changed.wait(now).unwrap();
        }
    }
}

/// What threads ask of the driver.
#[derive(Clone, Copy)]
enum ModelCommand {
    /// Send something, in the next poll.
    Send,
    /// End a request at once, as a cancel does.
    End,
}

impl Polled for ModelDriver {
    type Command = ModelCommand;

    fn execute(&mut self, command: ModelCommand) {
        match command {
            ModelCommand::Send => self.to_send.set(self.to_send.get() + 1),
            ModelCommand::End => self.ends.add(1),
        }
    }

    fn poll(&mut self, _: u64) -> bool {
        let mut descriptors = self.kernel.descriptors.lock().unwrap();
        self.unarmed |= std::mem::take(&mut descriptors.source);
        drop(descriptors);
        let new = self.source.sent.load(Ordering::Acquire) - self.received.get();
        let done = new + self.to_send.replace(0);
        self.received.set(self.received.get() + new);
        if done > 0 {
            self.ends.add(done);
        }
        done > 0
    }

    fn has_work(&self) -> bool {
        self.to_send.get() > 0
    }

    fn take_unarmed(&mut self) -> bool {
        std::mem::take(&mut self.unarmed)
    }

    fn arm(&mut self, _: u64) -> bool {
        self.unarmed = false;
        self.source.armed.swap(1, Ordering::AcqRel);
        // pairs with the fence of `Peer::send`
        fence(Ordering::SeqCst);
        self.source.sent.load(Ordering::Relaxed) > self.received.get() || self.has_work()
    }

    fn end_block(&mut self) {
        self.source.armed.swap(0, Ordering::AcqRel);
    }

    fn next_timer(&self) -> u64 {
        u64::MAX
    }

    fn poll_every(&self) -> Option<Duration> {
        None
    }

    fn has_ended(&self, request: u64) -> bool {
        self.ends.is(request as u32)
    }
}

/// The other side of the source.
struct Peer {
    source: Arc<Source>,
    kernel: Arc<Kernel>,
}

impl Peer {
    fn send(&self) {
        self.source.sent.fetch_add(1, Ordering::Release);
        // pairs with the fence of `ModelDriver::arm`
        fence(Ordering::SeqCst);
        if self.source.armed.swap(0, Ordering::AcqRel) == 1 {
            self.kernel.signal(|descriptors| descriptors.source = true);
        }
    }
}

struct Model {
    poller: Arc<Poller<ModelDriver, ModelEvents>>,
    peer: Peer,
    ends: Arc<Ends>,
}

impl Model {
    fn new(timed: Duration, broken: Option<Rule>) -> Self {
        let kernel = Arc::new(Kernel::default());
        let source = Arc::new(Source { sent: AtomicU32::new(0), armed: AtomicU32::new(0) });
        let ends = Arc::new(Ends::default());
        let driver = ModelDriver {
            source: source.clone(),
            kernel: kernel.clone(),
            received: Cell::new(0),
            to_send: Cell::new(0),
            unarmed: false,
            ends: ends.clone(),
        };
        let events = ModelEvents { kernel: kernel.clone(), timed };
        let mut poller = Poller::new(driver, events, Duration::ZERO);
        poller.broken = broken;
        Self { poller: Arc::new(poller), peer: Peer { source, kernel }, ends }
    }

    /// Runs the progress thread until `beside` returns.
    fn run(self, beside: impl FnOnce(&Self)) {
        let progress = {
            let poller = self.poller.clone();
            thread::spawn(move || poller.run())
        };
        beside(&self);
        self.poller.stop();
        progress.join().unwrap();
    }
}

fn explore(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

/// A peer sends, and no thread but the progress thread polls.
fn arrivals_are_served(broken: Option<Rule>) {
    explore(move || {
        Model::new(Duration::MAX, broken).run(|model| {
            model.peer.send();
            model.ends.wait_for(1);
        });
    });
}

/// Two threads post what neither of them polls for.
fn posts_are_sent(broken: Option<Rule>) {
    explore(move || {
        Model::new(Duration::MAX, broken).run(|model| {
            let post = |poller: &Poller<ModelDriver, ModelEvents>| {
                poller.submit(ModelCommand::Send);
                poller.notify_if_blocked();
            };
            let poller = model.poller.clone();
            let other = thread::spawn(move || post(&poller));
            post(&model.poller);
            model.ends.wait_for(2);
            other.join().unwrap();
        });
    });
}

/// A waiter polls, does not find what it waits for, and blocks. Nothing but a notification ends a
/// pause of the progress thread.
fn waiters_are_woken(broken: Option<Rule>) {
    explore(move || {
        let Model { poller, peer, ends } = Model::new(Duration::ZERO, broken);
        let waiter = {
            let (poller, ends) = (poller.clone(), ends.clone());
            thread::spawn(move || {
                if !poller.poll_until(|| ends.is(1), 1, 0, Duration::ZERO) {
                    poller.hand_over();
                    ends.wait_for(1);
                }
            })
        };
        Model { poller, peer, ends }.run(|model| {
            model.peer.send();
            waiter.join().unwrap();
        });
    });
}

/// Polls, and blocks until `count` requests have ended: as a leader where the role is free.
fn wait_as_leader(poller: &Poller<ModelDriver, ModelEvents>, ends: &Ends, count: u32) {
    let over = || ends.is(count);
    if !poller.poll_until(over, 1, 0, Duration::ZERO)
        && !poller.lead_until(count.into(), over, u64::MAX)
    {
        poller.hand_over();
        ends.wait_for(count);
    }
}

/// A waiter takes the role where it is free. What it waits for comes by an event.
fn leaders_are_woken(broken: Option<Rule>) {
    explore(move || {
        let Model { poller, peer, ends } = Model::new(WATCH, broken);
        let waiter = {
            let (poller, ends) = (poller.clone(), ends.clone());
            thread::spawn(move || wait_as_leader(&poller, &ends, 1))
        };
        Model { poller, peer, ends }.run(|model| {
            model.peer.send();
            waiter.join().unwrap();
        });
    });
}

/// Another thread ends the request that a leader waits for, and no event announces it.
fn leaders_learn_of_their_end(broken: Option<Rule>) {
    explore(move || {
        let Model { poller, peer, ends } = Model::new(WATCH, broken);
        let waiter = {
            let (poller, ends) = (poller.clone(), ends.clone());
            thread::spawn(move || wait_as_leader(&poller, &ends, 1))
        };
        Model { poller, peer, ends }.run(|model| {
            model.poller.submit(ModelCommand::End);
            waiter.join().unwrap();
        });
    });
}

/// A leader leaves while another waiter is blocked on its slot. The progress thread, whose pause
/// only a `resume` ends, serves that waiter.
fn followers_are_served(broken: Option<Rule>) {
    explore(move || {
        let Model { poller, peer, ends } = Model::new(WATCH, broken);
        let leader = {
            let (poller, ends) = (poller.clone(), ends.clone());
            thread::spawn(move || {
                poller.lead_until(1, || ends.is(1), u64::MAX);
            })
        };
        Model { poller, peer, ends }.run(|model| {
            model.peer.send();
            model.poller.hand_over();
            leader.join().unwrap();
            model.peer.send();
            model.ends.wait_for(2);
        });
    });
}

/// A thread polls once, takes the event of a source that the progress thread had armed, and leaves.
#[test]
fn an_event_that_another_thread_takes_is_armed_again() {
    explore(|| {
        Model::new(Duration::MAX, None).run(|model| {
            let poller = model.poller.clone();
            let passer = thread::spawn(move || {
                poller.poll_once(1);
            });
            model.peer.send();
            model.ends.wait_for(1);
            passer.join().unwrap();
            model.peer.send();
            model.ends.wait_for(2);
        });
    });
}

#[test]
fn the_progress_thread_serves_arrivals() {
    arrivals_are_served(None);
}

#[test]
#[should_panic(expected = "deadlock")]
fn not_if_it_does_not_look_after_arming() {
    arrivals_are_served(Some(Rule::ArmThenLook));
}

#[test]
fn the_progress_thread_sends_what_others_post() {
    posts_are_sent(None);
}

#[test]
#[should_panic(expected = "deadlock")]
fn not_if_the_queue_is_not_looked_at_after_the_release() {
    posts_are_sent(Some(Rule::ReleaseThenLook));
}

#[test]
#[should_panic(expected = "deadlock")]
fn not_if_nobody_tells_it_of_work() {
    posts_are_sent(Some(Rule::LeaveNoWork));
}

#[test]
fn a_leader_is_woken() {
    leaders_are_woken(None);
}

#[test]
#[should_panic(expected = "deadlock")]
fn not_if_a_leader_does_not_look_after_arming() {
    leaders_are_woken(Some(Rule::ArmThenLook));
}

#[test]
fn a_leader_learns_of_its_end() {
    leaders_learn_of_their_end(None);
}

#[test]
#[should_panic(expected = "deadlock")]
fn not_if_other_threads_do_not_tell_it() {
    leaders_learn_of_their_end(Some(Rule::TellLeader));
}

#[test]
fn a_follower_is_served_when_the_leader_leaves() {
    followers_are_served(None);
}

#[test]
#[should_panic(expected = "deadlock")]
fn not_if_the_leader_does_not_look_for_followers() {
    followers_are_served(Some(Rule::ReleaseThenResume));
}

#[test]
fn a_waiter_that_blocks_is_woken() {
    waiters_are_woken(None);
}

#[test]
#[should_panic(expected = "deadlock")]
fn not_if_it_does_not_hand_over() {
    waiters_are_woken(Some(Rule::HandOver));
}
