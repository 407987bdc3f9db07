//! How the driver replaces lost queue pairs.
//!
//! The initiator of a session offers new queue pairs, and the peer answers with its ends. New queue
//! pairs are created and connected in another thread, one for each session at a time, because that
//! may block.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use peerway_core::wire::{Control, QueueOffer};

use super::driver::Driver;
use super::ending::LaneEnd;
use super::lane::Lane;
use super::sessions::SessionDriver;
use super::shard::DriverCommand;
use crate::clock;
use crate::session::Session;
use crate::transport::device::{CompletionQueue, DeviceQueue, KeyTable};
use crate::transport::queues::{self, NewQueues};

/// How long a peer may take to answer an offer of queue pairs.
const ANSWER: Duration = Duration::from_secs(2);
/// The shortest and the longest pause between attempts to replace a queue pair.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// Queue pairs that are to replace lost ones. Only the initiator of a session offers any.
#[derive(Default)]
pub(crate) struct Reopening {
    /// A thread creates or connects queue pairs for this session.
    is_busy: bool,
    /// The lanes whose queue pairs that thread connects to the peer's ends.
    connecting: Vec<u16>,
    /// Our ends that wait for the peer's ends.
    waiting: NewQueues,
    answers: Vec<queues::Answer>,
    /// The peer's latest offer. It waits while the thread works on an earlier one.
    offers: Vec<QueueOffer>,
    /// When the next attempt is due.
    at: u64,
    /// When the current attempt times out.
    give_up: u64,
    pause: Duration,
}

impl Reopening {
    /// The peer has answered. An answer that no offer waits for is ignored.
    pub(super) fn answered(&mut self, queues: Vec<queues::Answer>) {
        if !self.is_busy {
            self.answers = queues;
        }
    }

    /// The peer offers queue pairs. Only the initiator may.
    pub(super) fn offered(&mut self, queues: Vec<QueueOffer>) {
        self.offers = queues;
    }

    /// Whether there are answers or offers to handle.
    pub(super) fn has_news(&self) -> bool {
        !self.is_busy && (!self.answers.is_empty() || !self.offers.is_empty())
    }

    /// Whether a thread connects the new queue pair of this lane. The peer's writes may arrive by
    /// it from some moment on, so the lane cannot be fenced before the thread is done.
    pub(super) fn is_connecting(&self, lane: u16) -> bool {
        self.connecting.contains(&lane)
    }

    /// Whether a thread connects any queue pair of this session.
    pub(super) fn connects_any(&self) -> bool {
        !self.connecting.is_empty()
    }

    pub(super) fn soon(&mut self, now: u64) {
        self.at = self.at.min(clock::after(now, self.pause));
    }
}

/// What a thread has done for the queue pairs of a session.
pub(crate) enum QueuesDone {
    /// It created our ends, which are to be offered.
    Offer(Result<(NewQueues, Vec<QueueOffer>), String>),
    /// It created our ends for the peer's offer and connected them.
    Answer(NewQueues, Vec<queues::Answer>),
    /// It connected our ends to those of the peer's answer.
    Connect(NewQueues),
}

impl SessionDriver {
    /// Lanes that had queue pairs and can have them again.
    fn lost_queues(&self) -> impl Iterator<Item = &queues::Plan> {
        let rdma = self.session.rdma.as_ref().filter(|_| self.session.initiator);
        let plans = rdma.into_iter().flat_map(|rdma| &rdma.plans);
        plans.filter(|plan| {
            self.lanes.get(usize::from(plan.lane)).is_none_or(Option::is_none)
                && !self.lost.is_awaiting(plan.lane)
                && !self.unfinished.contains_key(&plan.lane)
        })
    }

    /// The time until the next timer for queue pairs.
    pub(super) fn until_queues(&self, now: u64) -> Duration {
        let draining = self.lanes.iter().flatten().filter_map(|lane| lane.draining);
        let next = draining.map(|until| clock::until(until, now)).min();
        let due = if self.reopening.waiting.is_empty() {
            self.reopening.at
        } else {
            self.reopening.give_up
        };
        let idle = !self.reopening.is_busy;
        let reopening = self.lost_queues().next().filter(|_| idle).map(|_| clock::until(due, now));
        next.into_iter().chain(reopening).min().unwrap_or(Duration::MAX)
    }
}

impl Driver {
    /// Handles the timers of queue pairs.
    pub(super) fn queues_tick(&mut self, s: &mut SessionDriver, now: u64) {
        for at in 0..s.lanes.len() {
            let late = s.lanes[at].as_ref().and_then(|lane| lane.draining);
            if late.is_some_and(|until| now >= until) {
                let error = io::Error::other("the queue pair did not drain in time");
                self.lane_ended(s, at, LaneEnd::Broken(error));
            }
        }
        if s.reopening.is_busy {
            return;
        }
        let waiting = !s.reopening.waiting.is_empty();
        if waiting && now >= s.reopening.give_up {
            s.reopening.waiting = NewQueues::default();
            s.reopening.at = clock::after(now, s.reopening.pause);
        } else if !waiting && now >= s.reopening.at && s.lost_queues().next().is_some() {
            self.make_offer(s, now);
        }
    }

    /// Runs `work` in another thread, because it may block. [`Self::queues_done`] gets the result.
    /// The text says why there is no thread.
    fn in_thread(
        &self,
        s: &mut SessionDriver,
        work: impl FnOnce(&[Arc<dyn CompletionQueue>]) -> QueuesDone + Send + 'static,
    ) -> Result<(), String> {
        let (shard, session) = (self.shard.clone(), s.session.clone());
        let started = queues::in_thread(&self.endpoint.cpus, move || {
            let done = Box::new(work(shard.ports()));
            shard.submit(DriverCommand::QueuesDone { session, done });
            shard.notify_if_blocked();
        });
        s.reopening.is_busy = started.is_ok();
        started
    }

    /// Handles the result of a thread. If the session is over, nothing uses the queue pairs, and
    /// dropping them has them destroyed.
    pub(super) fn queues_done(&mut self, session: &Arc<Session>, done: QueuesDone) {
        self.with(session, |driver, s| {
            if !s.session.is_alive() {
                return;
            }
            s.reopening.is_busy = false;
            s.reopening.connecting.clear();
            match done {
                QueuesDone::Offer(made) => driver.offer_queues(s, made),
                QueuesDone::Answer(queues, answers) => driver.answer_queues(s, queues, answers),
                QueuesDone::Connect(queues) => driver.install_queues(s, queues),
            }
        });
    }

    /// Has new queue pairs created in place of lost ones.
    fn make_offer(&mut self, s: &mut SessionDriver, now: u64) {
        let plans: Vec<queues::Plan> = s.lost_queues().copied().collect();
        s.reopening.pause = (s.reopening.pause * 2).clamp(PAUSES.0, PAUSES.1);
        s.reopening.at = clock::after(now, s.reopening.pause);
        let made = self.in_thread(s, move |ports| {
            let made = queues::offer(ports, &plans);
            QueuesDone::Offer(made.map(|(queues, offers)| (NewQueues::new(queues), offers)))
        });
        if let Err(why) = made {
            tracing::debug!(why, peer = %s.session.addr, "cannot create queue pairs to offer");
        }
    }

    /// Offers new queue pairs in place of lost ones.
    fn offer_queues(
        &mut self,
        s: &mut SessionDriver,
        made: Result<(NewQueues, Vec<QueueOffer>), String>,
    ) {
        let now = clock::now();
        self.set_timer(s, now);
        let (queues, offers) = match made {
            Ok(made) => made,
            Err(why) => {
                tracing::debug!(why, peer = %s.session.addr, "cannot create queue pairs to offer");
                s.reopening.at = clock::after(now, s.reopening.pause);
                return;
            }
        };
        s.reopening.waiting = queues;
        s.reopening.give_up = clock::after(now, ANSWER);
        if let Some(lane) = s.control_lane() {
            lane.push_control(&Control::OpenQueues { queues: offers });
            s.dirty = true;
        }
    }

    /// Handles the peer's answer to an offer: has the queue pairs that have a far end connected.
    pub(super) fn connect_queues(&mut self, s: &mut SessionDriver) {
        let answers = std::mem::take(&mut s.reopening.answers);
        if answers.is_empty() {
            return;
        }
        let Some(rdma) = s.session.rdma.clone() else { return };
        let waiting = std::mem::take(&mut s.reopening.waiting);
        if waiting.is_empty() {
            return;
        }
        let (peer, lanes) = (s.session.addr, waiting.lanes());
        let connected = self.in_thread(s, move |_| {
            let queues = waiting.take();
            let queues = queues::connect(peer, queues, &answers, &rdma.ports, u64::MAX);
            QueuesDone::Connect(NewQueues::new(queues))
        });
        match connected {
            Ok(()) => s.reopening.connecting = lanes,
            Err(why) => {
                tracing::debug!(why, %peer, "cannot connect queue pairs");
                self.install_queues(s, NewQueues::default());
            }
        }
    }

    /// The connected queue pairs become lanes.
    fn install_queues(&mut self, s: &mut SessionDriver, queues: NewQueues) {
        let now = clock::now();
        for (lane, queue) in queues.take() {
            // Only failed attempts lengthen the pause. A queue pair that fails again has worked
            // before.
            s.reopening.pause = Duration::ZERO;
            self.install(s, lane, queue, now);
        }
        s.reopening.at = clock::after(now, s.reopening.pause);
        self.set_timer(s, now);
        s.dirty = true;
    }

    /// Handles the initiator's offer of queue pairs in place of lost ones: has our ends created and
    /// connected. All lanes are in the table here.
    pub(super) fn open_queues(&mut self, s: &mut SessionDriver) {
        if s.reopening.is_busy || s.reopening.offers.is_empty() {
            return;
        }
        let offers = std::mem::take(&mut s.reopening.offers);
        let Some(rdma) = s.session.rdma.clone() else { return };
        let lost = |offer: &QueueOffer| {
            let at = usize::from(offer.lane);
            at != 0 && s.lanes.get(at).is_none_or(Option::is_none)
        };
        let (lost, others): (Vec<QueueOffer>, Vec<QueueOffer>) =
            offers.iter().partition(|o| lost(o));
        let opened = self.in_thread(s, move |ports| {
            let (queues, mut answers) = queues::answer(ports, &rdma.ports, &lost);
            let not_lost = || Err("the lane is still open".to_owned());
            answers.extend(others.iter().map(|offer| (offer.lane, not_lost())));
            QueuesDone::Answer(NewQueues::new(queues), answers)
        });
        if let Err(why) = opened {
            let answers = offers.iter().map(|offer| (offer.lane, Err(why.clone()))).collect();
            self.answer_queues(s, NewQueues::default(), answers);
        }
    }

    /// Answers the initiator's offer, and uses our ends.
    fn answer_queues(
        &mut self,
        s: &mut SessionDriver,
        queues: NewQueues,
        answers: Vec<queues::Answer>,
    ) {
        // The initiator has given up its earlier offer, so these ends have no far end.
        if !s.reopening.offers.is_empty() {
            return;
        }
        if let Some(lane) = s.control_lane() {
            lane.push_control_answer(&Control::QueuesOpened { queues: answers });
            s.dirty = true;
        }
        let now = clock::now();
        for (at, queue) in queues.take() {
            self.install(s, at, queue, now);
        }
    }

    /// Installs a queue pair in place of a lost one.
    fn install(&mut self, s: &mut SessionDriver, at: u16, queue: Box<dyn DeviceQueue>, now: u64) {
        let (port, key) = (queue.device(), queue.key());
        let index = usize::from(at);
        if s.lanes.len() <= index {
            s.lanes.resize_with(index + 1, || None);
        }
        // Drop a queue pair whose lane exists already, or whose session has ended: it was not
        // requested.
        if s.lanes[index].is_some() || !s.session.is_alive() {
            return;
        }
        let mut lane = Lane::of_queue(at, queue, now);
        // Keys for the lost queue pair are void. Each side sends new ones for its memory.
        s.session.forget_keys(KeyTable::of_lane(at));
        self.want_keys(s);
        if let Some(frames) = self.endpoint.config.max_inflight_ops {
            lane.limit_frames(frames);
        }
        s.lanes[index] = Some(Box::new(lane));
        s.lost.replaced(at);
        s.liveness.beat_at_once(now);
        self.set_timer(s, now);
        // The session is out of the table, so process the early completions here.
        for completion in self.ports[port].adopt(key, s.index, at) {
            self.completed(s, at.into(), &completion, now);
        }
        self.unarmed = true;
        self.ports[port].armed = false;
        tracing::debug!(lane = at, peer = %s.session.addr, "queue pair replaced");
    }
}
