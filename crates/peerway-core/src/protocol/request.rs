//! A request: what of a transfer is sent, answered and left, and how it ends.
//!
//! The engine tells the request what happened: a frame went out, an answer came, a lane or the
//! session was lost, time passed. The request says what follows ([`Effect`]). In particular it
//! decides when a transfer ends and whether its fence is held, so the two promises that need a
//! proof are decided here and nowhere else.

use crate::outcome::{Ended, Fence, Reason, TransferError};
use crate::wire::Kind;
use crate::work::Cursor;

/// How lanes carry a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Route {
    /// Payload goes out in frames.
    Write,
    /// Payload comes back in frames.
    Read,
    /// The peer copies from our memory.
    Pull,
    /// No payload.
    SignalOnly,
}

impl Route {
    /// The kind of its data frames, if it has any.
    #[inline]
    pub fn frame(self) -> Option<Kind> {
        match self {
            Self::Write => Some(Kind::Write),
            Self::Read => Some(Kind::Read),
            Self::Pull => Some(Kind::Pull),
            Self::SignalOnly => None,
        }
    }
}

/// See the module.
#[derive(Debug)]
pub struct RequestState {
    route: Route,
    /// The rest that is not yet in frames or parts.
    at: Cursor,
    /// Parts to send again, because their lane failed before the peer applied them.
    redo: Vec<Cursor>,
    /// Parts that are being copied out of GPU memory, before they go into frames.
    fetched: u32,
    /// Frames, parts, flushes and copies into GPU memory that are not yet answered.
    unanswered: u32,
    /// Of these, parts that devices are working on.
    parts: u32,
    /// Of these, copies into GPU memory.
    puts: u32,
    /// A bit for each lane whose device carried parts of it.
    lanes: u64,
    /// Whether device writes to the peer's memory become visible only after a flush.
    is_unordered: bool,
    /// Whether the devices that carried parts were asked to flush.
    is_flushed: bool,
    signal: SignalDue,
    /// Whether the signal has been sent, with the last frame or after it.
    is_signal_sent: bool,
    /// The reason for which it will end as soon as its fence is held, and the latest time for that.
    ending: Option<(Reason, u64)>,
    /// Whether it has ended with an open fence. It only keeps its memory then.
    is_unfenced: bool,
}

/// The signal that follows a transfer's bytes.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct SignalDue {
    /// A notification.
    pub notify: bool,
    /// A count of this counter.
    pub count: Option<u32>,
}

impl SignalDue {
    #[inline]
    fn is_empty(self) -> bool {
        !self.notify && self.count.is_none()
    }
}

/// What follows from an event.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[must_use]
pub enum Effect {
    /// Nothing now.
    Wait,
    /// Every byte is answered: flush the devices and send the signal.
    Signal,
    /// The transfer ends for its user. With an open fence the request stays and keeps its memory.
    Finish(Ended),
    /// The fence of a transfer that ended with an open one is held now. The request is over.
    Fenced,
    /// No proof can come any more. The request is over. The transfer ends with an open fence, if it
    /// has not ended before.
    GivenUp(Option<Ended>),
}

/// What a deadline demands.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Expiry {
    /// Nothing yet.
    No,
    /// The transfer took too long: stop it.
    Stop,
    /// Our own devices still work on a stopped read: stop them, then its fence is held.
    Sever,
    /// The fence could not be held in time.
    End(Ended),
}

/// What is known about the peer of a session that is over.
#[derive(Clone, Copy, Debug)]
pub struct Loss {
    /// The error of transfers that were not ending before.
    pub error: TransferError,
    /// It is proven that the peer applies nothing more.
    pub is_proven: bool,
    /// The time until which a proof may still come, if one can.
    pub proof_until: Option<u64>,
}

/// A part that is being cut: see [`RequestState::begin_cut`].
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    /// Where it begins.
    pub start: Cursor,
    is_repeated: bool,
}

impl RequestState {
    /// A request for the work after `at`, with the signal that follows.
    #[inline]
    pub fn new(route: Route, at: Cursor, signal: SignalDue, is_unordered: bool) -> Self {
        Self {
            route,
            at,
            redo: Vec::new(),
            fetched: 0,
            unanswered: 0,
            parts: 0,
            puts: 0,
            lanes: 0,
            is_unordered,
            is_flushed: false,
            signal,
            is_signal_sent: false,
            ending: None,
            is_unfenced: false,
        }
    }

    /// How lanes carry it.
    #[inline]
    pub fn route(&self) -> Route {
        self.route
    }

    /// Bytes that are not yet in frames or parts, without those to repeat.
    #[inline]
    pub fn left(&self) -> u64 {
        self.at.left()
    }

    /// Whether some of it is left to put into frames or parts.
    #[inline]
    pub fn has_more(&self) -> bool {
        self.ending.is_none() && (self.at.left() > 0 || !self.redo.is_empty() || self.fetched > 0)
    }

    /// Bytes up to the next place where a part must end.
    #[inline]
    pub fn next_len(&self) -> u64 {
        self.redo.last().unwrap_or(&self.at).left()
    }

    /// Whether it carries no bytes, so that it can change no memory. A fence does not cover a
    /// notification that may still arrive.
    #[inline]
    pub fn is_bare(&self) -> bool {
        self.route == Route::SignalOnly
    }

    /// Whether it can change no memory any more. The engine discards payload that a stopped read
    /// still receives in frames. It cannot stop a device's read or a GPU's copy, so those must
    /// finish.
    #[inline]
    pub fn is_quiet(&self) -> bool {
        self.puts == 0 && (self.unanswered == 0 || (self.route == Route::Read && self.parts == 0))
    }

    /// Whether it is stopped, or has failed, and waits for its fence.
    #[inline]
    pub fn is_ending(&self) -> bool {
        self.ending.is_some()
    }

    /// The reason for which it will end, if it is ending.
    #[inline]
    pub fn end_reason(&self) -> Option<Reason> {
        self.ending.map(|(reason, _)| reason)
    }

    /// Whether it has ended for its user with an open fence.
    #[inline]
    pub fn is_unfenced(&self) -> bool {
        self.is_unfenced
    }

    /// Whether the peer may still copy from its memory.
    pub fn has_pulls(&self) -> bool {
        self.route == Route::Pull && self.unanswered > 0
    }

    /// Whether devices carried parts of it.
    #[inline]
    pub fn is_by_devices(&self) -> bool {
        self.lanes != 0
    }

    /// Takes the next part to cut a frame or a device's part from.
    #[inline]
    pub fn begin_cut(&mut self) -> Cut {
        match self.redo.pop() {
            Some(start) => Cut { start, is_repeated: true },
            None => Cut { start: self.at, is_repeated: false },
        }
    }

    /// Cuts `bytes` off the part, up to `rest`. Returns what was cut.
    #[inline]
    pub fn end_cut(&mut self, cut: Cut, rest: Cursor) -> Cursor {
        if !cut.is_repeated {
            self.at = rest;
        } else if rest.left() > 0 {
            self.redo.push(rest);
        }
        cut.start.limited(cut.start.left() - rest.left())
    }

    /// A part is being copied out of GPU memory.
    pub fn fetch_began(&mut self) {
        self.fetched += 1;
    }

    /// That copy is done, and its part goes into a frame.
    #[inline]
    pub fn fetch_ended(&mut self) {
        self.fetched -= 1;
    }

    /// A frame was made. Returns the counter that it must raise: if nothing else of the request is
    /// unanswered or left, the frame carries the count, and the peer sees it with the bytes. What
    /// devices wrote must be flushed first.
    #[inline]
    pub fn frame_made(&mut self) -> Option<u32> {
        let is_last = self.unanswered == 0 && self.is_all_cut() && self.lanes == 0;
        let carries = matches!(self.route, Route::Write | Route::Pull);
        let count = self.signal.count.filter(|_| is_last && carries && !self.signal.notify);
        self.is_signal_sent |= count.is_some();
        self.unanswered += 1;
        count
    }

    /// A part was made for the device of this lane. Returns the counter that its last write must
    /// raise: if that device carries all bytes, in order, the count can come with the last ones.
    /// `can_count` says whether the device keeps the order and the peer can take an immediate.
    #[inline]
    pub fn part_made(&mut self, lane: u16, can_count: impl FnOnce() -> bool) -> Option<u32> {
        let bit = lane_bit(lane);
        self.lanes |= bit;
        let is_framed = self.unanswered > self.parts;
        let is_alone = self.lanes == bit && !is_framed && !self.signal.notify;
        // An immediate arrives in host memory. It proves nothing about writes to GPU memory that
        // need a flush.
        let is_last = self.route == Route::Write && self.is_all_cut() && !self.is_unordered;
        let count = self.signal.count.filter(|_| is_last && is_alone && can_count());
        self.is_signal_sent |= count.is_some();
        self.unanswered += 1;
        self.parts += 1;
        count
    }

    #[inline]
    fn is_all_cut(&self) -> bool {
        self.at.left() == 0 && self.redo.is_empty() && self.fetched == 0
    }

    /// A copy into GPU memory began. Its frame was answered, the copy was not.
    pub fn put_began(&mut self) {
        self.puts += 1;
    }

    /// That copy is done.
    pub fn put_ended(&mut self) {
        self.puts -= 1;
    }

    /// The peer answered a frame of this kind.
    #[inline]
    pub fn answered(&mut self, kind: Kind) {
        self.unanswered -= 1;
        match kind {
            Kind::Notify => self.signal.notify = false,
            Kind::Count => self.signal.count = None,
            _ => {}
        }
    }

    /// A device completed a part.
    #[inline]
    pub fn part_answered(&mut self) {
        self.parts -= 1;
        self.unanswered -= 1;
    }

    /// A device lost a part, which [`Self::answered`] or [`Self::repeat`] settles.
    pub fn part_lost(&mut self) {
        self.parts -= 1;
    }

    /// It fails as soon as its fence is held, at the latest at `until`.
    pub fn fail(&mut self, error: TransferError, until: u64) {
        self.ending.get_or_insert((Reason::Failed(error), until));
    }

    /// A lost lane carried this part, and the peer did not apply it. Returns whether it must be
    /// sent again.
    pub fn repeat(&mut self, part: Cursor) -> bool {
        self.unanswered -= 1;
        self.is_signal_sent = false;
        self.is_flushed = false;
        if self.ending.is_none() {
            self.redo.push(part);
        }
        self.ending.is_none()
    }

    /// A lost lane carried the signal, and the peer did not apply it.
    pub fn repeat_signal(&mut self) {
        self.unanswered -= 1;
        self.is_signal_sent = false;
    }

    /// The lanes whose devices must be flushed before the signal is sent, once. `None` if there are
    /// none.
    #[inline]
    pub fn begin_flush(&mut self) -> Option<u64> {
        let is_due = self.lanes != 0 && !self.is_flushed && self.route == Route::Write;
        self.is_flushed |= is_due;
        is_due.then_some(self.lanes)
    }

    /// Whether only a flush of the peer's memory itself makes its device writes visible.
    pub fn is_unordered(&self) -> bool {
        self.is_unordered
    }

    /// Flushes were posted.
    pub fn flushes_posted(&mut self, count: u32) {
        self.unanswered += count;
    }

    /// A flush is done.
    pub fn flush_answered(&mut self) {
        self.unanswered -= 1;
    }

    /// The signal to send now. `None` if there is none, or the request is ending.
    #[inline]
    pub fn take_signal(&mut self) -> Option<SignalDue> {
        if self.is_signalled() || self.ending.is_some() {
            return None;
        }
        self.is_signal_sent = true;
        self.unanswered += u32::from(self.signal.notify) + u32::from(self.signal.count.is_some());
        Some(self.signal)
    }

    /// Whether there is no signal, or it was sent.
    #[inline]
    pub fn is_signalled(&self) -> bool {
        self.signal.is_empty() || self.is_signal_sent
    }

    /// What follows from what was answered so far.
    #[inline]
    pub fn settle(&self) -> Effect {
        if self.is_unfenced {
            return if self.is_quiet() { Effect::Fenced } else { Effect::Wait };
        }
        if let Some((reason, _)) = self.ending {
            let ended = Ended { reason, fence: Fence::Held };
            return if self.is_quiet() { Effect::Finish(ended) } else { Effect::Wait };
        }
        if self.unanswered > 0 || self.has_more() {
            return Effect::Wait;
        }
        let must_flush = self.lanes != 0 && !self.is_flushed && self.is_unordered;
        if self.is_signalled() && !must_flush {
            Effect::Finish(Ended::DONE)
        } else {
            Effect::Signal
        }
    }

    /// Stops the request: no more of it is sent, and it ends when everything sent is answered, at
    /// the latest at `until`. Returns false if it was ending or over before.
    pub fn stop(&mut self, reason: Reason, until: u64) -> bool {
        if self.ending.is_some() || self.is_unfenced {
            return false;
        }
        self.ending = Some((reason, until));
        self.fetched = 0;
        true
    }

    /// The transfer ends for its user. Returns whether the request is over. With an open fence it
    /// stays and keeps its memory.
    #[inline]
    pub fn finish(&mut self, ended: Ended) -> bool {
        self.is_unfenced |= ended.fence == Fence::Open;
        ended.fence == Fence::Held
    }

    /// The time of its next deadline, given that of the transfer. `None` if it has none.
    pub fn due(&self, deadline: u64) -> Option<u64> {
        let due = self.ending.map_or(deadline, |(_, until)| until);
        (!self.is_unfenced).then_some(due)
    }

    /// What its deadlines demand at this time. `deadline` is that of the transfer.
    pub fn expired(&self, now: u64, deadline: u64) -> Expiry {
        if self.due(deadline).is_none_or(|due| now < due) {
            return Expiry::No;
        }
        match self.ending {
            None => Expiry::Stop,
            Some(_) if self.route == Route::Read && self.parts > 0 => Expiry::Sever,
            Some((reason, _)) => {
                let fence = if self.is_bare() { Fence::Held } else { Fence::Open };
                Expiry::End(Ended { reason, fence })
            }
        }
    }

    /// A peer of this host is silent, and may only be stopped: the transfer ends now. Its fence is
    /// held if it is quiet, or carries no bytes: a notification changes no memory.
    pub fn silenced(&self) -> Effect {
        if self.is_unfenced {
            return Effect::Wait;
        }
        let reason = Reason::Failed(TransferError::PeerSilent);
        let reason = self.end_reason().unwrap_or(reason);
        Effect::Finish(Ended { reason, fence: self.fence_now() })
    }

    /// The fence if the transfer ended at this moment.
    pub fn fence_now(&self) -> Fence {
        if self.is_quiet() || self.is_bare() { Fence::Held } else { Fence::Open }
    }

    /// The session is over, and with it every lane and every read by our own devices. `is_refused`
    /// says that the peer's device refused a read of this request. Devices refuse reads while the
    /// peer's process dies, so that refusal does not mean that the peer revoked the memory.
    pub fn session_lost(&mut self, loss: &Loss, is_refused: bool) -> Effect {
        let is_held =
            loss.is_proven || self.route == Route::Read || self.is_bare() || self.unanswered == 0;
        if self.is_unfenced {
            return if is_held { Effect::Fenced } else { Effect::Wait };
        }
        let has_died = loss.error == TransferError::PeerGone && is_refused;
        let reason = self.end_reason().filter(|_| !has_died).unwrap_or(Reason::Failed(loss.error));
        match loss.proof_until {
            _ if is_held => Effect::Finish(Ended { reason, fence: Fence::Held }),
            Some(until) => {
                self.ending.get_or_insert((reason, until));
                Effect::Wait
            }
            None => Effect::Finish(Ended { reason, fence: Fence::Open }),
        }
    }

    /// The proof about the peer of a lost session came, or cannot come any more.
    pub fn proof_over(&self, is_proven: bool) -> Effect {
        let ended = |fence| match self.ending {
            Some((reason, _)) if !self.is_unfenced => Some(Ended { reason, fence }),
            _ => None,
        };
        match (is_proven, ended(Fence::Held)) {
            (true, Some(ended)) => Effect::Finish(ended),
            (true, None) => Effect::Fenced,
            (false, _) => Effect::GivenUp(ended(Fence::Open)),
        }
    }
}

/// The bit of a lane in a mask.
#[inline]
pub fn lane_bit(lane: u16) -> u64 {
    1 << (lane & 63)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::region::{MemoryKind, Span};
    use crate::work::{Pair, Place, Shape};

    const DEADLINE: u64 = 1_000;
    const FENCE: u64 = 100;

    fn shape(len: u64) -> Shape {
        let place = Place { region: 0, offset: 0, kind: MemoryKind::Host };
        let pair = Pair { local: place, remote: place, len };
        let extent = Span { offset: 0, len };
        Shape::range(pair, extent, extent).unwrap()
    }

    fn cut(request: &mut RequestState, shape: &Shape, bytes: u64) -> Cursor {
        let cut = request.begin_cut();
        let mut at = cut.start;
        let bytes = bytes.min(at.left());
        shape.advance(&mut at, bytes);
        request.end_cut(cut, at)
    }

    fn write(len: u64, signal: SignalDue) -> (RequestState, Shape) {
        let shape = shape(len);
        (RequestState::new(Route::Write, shape.start(), signal, false), shape)
    }

    const COUNT: SignalDue = SignalDue { notify: false, count: Some(7) };
    const BOTH: SignalDue = SignalDue { notify: true, count: Some(7) };

    #[test]
    fn a_count_travels_with_the_only_frame() {
        let (mut request, shape) = write(10, COUNT);
        cut(&mut request, &shape, 10);
        assert_eq!(request.frame_made(), Some(7));
        request.answered(Kind::Write);
        assert_eq!(request.settle(), Effect::Finish(Ended::DONE));
    }

    #[test]
    fn a_count_does_not_overtake_an_unanswered_frame() {
        let (mut request, shape) = write(10, COUNT);
        cut(&mut request, &shape, 5);
        assert_eq!(request.frame_made(), None);
        cut(&mut request, &shape, 5);
        assert_eq!(request.frame_made(), None, "the first frame is not answered");
        request.answered(Kind::Write);
        assert_eq!(request.settle(), Effect::Wait);
        request.answered(Kind::Write);
        assert_eq!(request.settle(), Effect::Signal);
        assert_eq!(request.take_signal(), Some(COUNT));
        assert_eq!(request.settle(), Effect::Wait);
        request.answered(Kind::Count);
        assert_eq!(request.settle(), Effect::Finish(Ended::DONE));
    }

    #[test]
    fn a_repeated_part_takes_back_the_count_that_it_carried() {
        let (mut request, shape) = write(10, COUNT);
        let part = cut(&mut request, &shape, 10);
        assert_eq!(request.frame_made(), Some(7));
        assert!(request.repeat(part));
        assert_eq!((request.settle(), request.has_more()), (Effect::Wait, true));
        assert_eq!(cut(&mut request, &shape, 5), part.limited(5));
        assert_eq!(request.frame_made(), None);
        cut(&mut request, &shape, 5);
        assert_eq!(request.frame_made(), None);
        request.answered(Kind::Write);
        request.answered(Kind::Write);
        assert_eq!(request.settle(), Effect::Signal, "no frame carries the count now");
    }

    #[test]
    fn unordered_writes_are_flushed_before_the_end() {
        let shape = shape(10);
        let signal = SignalDue::default();
        let mut request = RequestState::new(Route::Write, shape.start(), signal, true);
        cut(&mut request, &shape, 10);
        assert_eq!(request.part_made(3, || true), None);
        request.part_answered();
        assert_eq!(request.settle(), Effect::Signal);
        assert_eq!(request.begin_flush(), Some(lane_bit(3)));
        request.flushes_posted(1);
        assert_eq!(request.settle(), Effect::Wait);
        request.flush_answered();
        assert_eq!(request.settle(), Effect::Finish(Ended::DONE));
        assert_eq!(request.begin_flush(), None, "once is enough");
    }

    #[test]
    fn a_stopped_read_by_frames_is_quiet_and_one_by_devices_is_not() {
        let shape = shape(10);
        let read = || {
            let signal = SignalDue::default();
            let mut request = RequestState::new(Route::Read, shape.start(), signal, false);
            cut(&mut request, &shape, 10);
            request
        };
        let mut by_frames = read();
        let _ = by_frames.frame_made();
        assert!(by_frames.stop(Reason::Cancelled, FENCE));
        let held = Ended { reason: Reason::Cancelled, fence: Fence::Held };
        assert_eq!(by_frames.settle(), Effect::Finish(held));
        let mut by_device = read();
        let _ = by_device.part_made(1, || true);
        assert!(by_device.stop(Reason::Cancelled, FENCE));
        assert_eq!(by_device.settle(), Effect::Wait);
        assert_eq!(by_device.expired(FENCE, DEADLINE), Expiry::Sever);
    }

    #[test]
    fn a_notification_that_may_still_arrive_leaves_no_fence_open() {
        let mut request = RequestState::new(Route::SignalOnly, Cursor::default(), BOTH, false);
        assert_eq!(request.settle(), Effect::Signal);
        assert_eq!(request.take_signal(), Some(BOTH));
        assert_eq!(request.expired(DEADLINE, DEADLINE), Expiry::Stop);
        assert!(request.stop(Reason::TimedOut, FENCE));
        let held = Ended { reason: Reason::TimedOut, fence: Fence::Held };
        assert_eq!(request.expired(FENCE, DEADLINE), Expiry::End(held));
    }

    #[test]
    fn without_a_proof_a_lost_write_is_open_until_one_comes_or_cannot() {
        let loss = |is_proven, proof_until| Loss {
            error: TransferError::PeerGone,
            is_proven,
            proof_until,
        };
        let gone = Reason::Failed(TransferError::PeerGone);
        let sent = || {
            let (mut request, shape) = write(10, SignalDue::default());
            cut(&mut request, &shape, 10);
            let _ = request.frame_made();
            request
        };
        let ended = |fence| Effect::Finish(Ended { reason: gone, fence });
        assert_eq!(sent().session_lost(&loss(true, None), false), ended(Fence::Held));
        assert_eq!(sent().session_lost(&loss(false, None), false), ended(Fence::Open));
        let mut waits = sent();
        assert_eq!(waits.session_lost(&loss(false, Some(FENCE)), false), Effect::Wait);
        assert_eq!(waits.proof_over(true), ended(Fence::Held));
        let open = Ended { reason: gone, fence: Fence::Open };
        assert_eq!(waits.proof_over(false), Effect::GivenUp(Some(open)));
        assert!(!waits.finish(open));
        assert_eq!(waits.proof_over(true), Effect::Fenced);
        assert_eq!(waits.proof_over(false), Effect::GivenUp(None));
    }

    /// Something that happens to a request. Numbers choose among what is possible.
    #[derive(Clone, Copy, Debug)]
    enum Event {
        Frame(u64),
        Part(u64),
        Answer(usize),
        Refuse(usize),
        Lose(usize),
        Stop,
        Pass(u64),
        Silence,
        Gone { proven: bool, later: bool },
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            4 => (1u64..9).prop_map(Event::Frame),
            2 => (1u64..9).prop_map(Event::Part),
            6 => any::<usize>().prop_map(Event::Answer),
            1 => any::<usize>().prop_map(Event::Refuse),
            2 => any::<usize>().prop_map(Event::Lose),
            1 => Just(Event::Stop),
            1 => (1u64..200).prop_map(Event::Pass),
            1 => Just(Event::Silence),
            1 => (any::<bool>(), any::<bool>())
                .prop_map(|(proven, later)| Event::Gone { proven, later }),
        ]
    }

    /// What is on its way, as an observer of both sides sees it.
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct InFlight {
        kind: Kind,
        part: Cursor,
        by_device: bool,
        with_count: bool,
    }

    /// A request and an observer that knows what the peer applied.
    struct Observed {
        request: RequestState,
        shape: Shape,
        in_flight: Vec<InFlight>,
        applied: u64,
        notified: u32,
        counted: u32,
        wanted: SignalDue,
        now: u64,
        is_proven: bool,
        /// How it ended for its user.
        ended: Option<Ended>,
        is_over: bool,
    }

    impl Observed {
        fn new(route: Route, len: u64, wanted: SignalDue, is_unordered: bool) -> Self {
            let shape = shape(len);
            let start = if route == Route::SignalOnly { Cursor::default() } else { shape.start() };
            let request = RequestState::new(route, start, wanted, is_unordered);
            let mut observed = Self {
                request,
                shape,
                in_flight: Vec::new(),
                applied: 0,
                notified: 0,
                counted: 0,
                wanted,
                now: 0,
                is_proven: false,
                ended: None,
                is_over: false,
            };
            if observed.request.left() == 0 {
                observed.follow(None);
            }
            observed
        }

        fn total(&self) -> u64 {
            if self.request.is_bare() { 0 } else { self.shape.total() }
        }

        fn send(&mut self, kind: Kind, part: Cursor, by_device: bool, with_count: bool) {
            self.in_flight.push(InFlight { kind, part, by_device, with_count });
        }

        /// Applies an effect, or what the request says by itself.
        fn follow(&mut self, effect: Option<Effect>) {
            match effect.unwrap_or_else(|| self.request.settle()) {
                Effect::Wait => {}
                Effect::Signal => {
                    assert_eq!(self.applied, self.total(), "a signal before its bytes");
                    assert!(self.in_flight.is_empty(), "a signal before its answers");
                    if self.request.begin_flush().is_some() {
                        self.request.flushes_posted(1);
                        self.request.flush_answered();
                    }
                    if self.request.is_signalled() {
                        return self.follow(None);
                    }
                    let due = self.request.take_signal().expect("it is due");
                    if due.notify {
                        self.send(Kind::Notify, Cursor::default(), false, false);
                    }
                    if due.count.is_some() {
                        self.send(Kind::Count, Cursor::default(), false, true);
                    }
                }
                Effect::Finish(ended) => self.finish(ended),
                Effect::Fenced => {
                    assert!(self.ended.is_some_and(|ended| ended.fence == Fence::Open));
                    self.check_quiet();
                    self.is_over = true;
                }
                Effect::GivenUp(ended) => {
                    assert_eq!(ended.is_some(), self.ended.is_none(), "it ends once");
                    self.ended = self.ended.or(ended);
                    assert!(self.ended.is_some_and(|ended| ended.fence == Fence::Open));
                    self.is_over = true;
                }
            }
        }

        fn finish(&mut self, ended: Ended) {
            assert_eq!(self.ended, None, "it ends once");
            self.ended = Some(ended);
            self.is_over = self.request.finish(ended);
            if ended.fence == Fence::Held {
                self.check_quiet();
            }
            if ended.reason == Reason::Done {
                assert_eq!(self.applied, self.total(), "done means there");
                assert_eq!(self.notified, u32::from(self.wanted.notify));
                assert_eq!(self.counted, u32::from(self.wanted.count.is_some()));
            }
        }

        /// Takes something out of flight. A device completes its parts in order.
        fn take(&mut self, at: usize) -> InFlight {
            let chosen = at % self.in_flight.len();
            let is_first = |sent: &InFlight| sent.by_device;
            let at = match self.in_flight[chosen].by_device {
                true => self.in_flight.iter().position(is_first).unwrap_or(chosen),
                false => chosen,
            };
            self.in_flight.remove(at)
        }

        fn sever(&mut self) {
            let severed: Vec<InFlight> =
                self.in_flight.extract_if(.., |sent| sent.by_device).collect();
            for sent in severed {
                self.request.part_lost();
                let _ = self.request.repeat(sent.part);
                self.follow(None);
            }
        }

        /// A held fence means that nothing on its way can change memory.
        fn check_quiet(&self) {
            let changes = |sent: &InFlight| match self.request.route() {
                Route::Write | Route::Pull => sent.part.left() > 0,
                Route::Read => sent.by_device,
                Route::SignalOnly => false,
            };
            let late = self.in_flight.iter().find(|sent| changes(sent));
            assert!(self.is_proven || late.is_none(), "held while {late:?} is on its way");
        }

        fn happen(&mut self, event: Event) {
            match event {
                Event::Frame(bytes) | Event::Part(bytes) => {
                    let is_part = matches!(event, Event::Part(_));
                    if !self.request.has_more() || (is_part && self.request.route() == Route::Pull)
                    {
                        return;
                    }
                    let part = cut(&mut self.request, &self.shape, bytes);
                    let count = match is_part {
                        true => self.request.part_made(1, || true),
                        false => self.request.frame_made(),
                    };
                    if count.is_some() {
                        let before = self.in_flight.iter().map(|sent| sent.part.left());
                        let before: u64 = before.sum();
                        let is_ordered = self.in_flight.iter().all(|sent| sent.by_device);
                        assert!(before == 0 || (is_part && is_ordered), "the count overtakes");
                    }
                    self.send(Kind::Write, part, is_part, count.is_some());
                }
                Event::Answer(at) | Event::Refuse(at) if !self.in_flight.is_empty() => {
                    let sent = self.take(at);
                    if sent.by_device {
                        self.request.part_answered();
                    } else {
                        self.request.answered(sent.kind);
                    }
                    if matches!(event, Event::Refuse(_)) {
                        self.request.fail(TransferError::RemoteAccess, self.now + FENCE);
                    } else {
                        self.applied += sent.part.left();
                        self.notified += u32::from(sent.kind == Kind::Notify);
                        self.counted += u32::from(sent.with_count);
                    }
                    self.follow(None);
                }
                Event::Lose(at) if !self.in_flight.is_empty() => {
                    let sent = self.in_flight[at % self.in_flight.len()];
                    if sent.by_device {
                        // The device is lost, with all its parts.
                        return self.sever();
                    }
                    self.in_flight.retain(|other| *other != sent);
                    match sent.kind {
                        Kind::Notify | Kind::Count => self.request.repeat_signal(),
                        _ => drop(self.request.repeat(sent.part)),
                    }
                    self.follow(None);
                }
                Event::Stop => {
                    if self.request.stop(Reason::Cancelled, self.now + FENCE) {
                        self.follow(None);
                    }
                }
                Event::Pass(time) => {
                    self.now += time;
                    match self.request.expired(self.now, DEADLINE) {
                        Expiry::No => {}
                        Expiry::Stop => {
                            assert!(self.request.stop(Reason::TimedOut, self.now + FENCE));
                            self.follow(None);
                        }
                        // The device is stopped, which answers for its parts.
                        Expiry::Sever => self.sever(),
                        Expiry::End(ended) => self.follow(Some(Effect::Finish(ended))),
                    }
                }
                Event::Silence => {
                    // Devices are not used between processes of one host.
                    if self.in_flight.iter().all(|sent| !sent.by_device) {
                        let effect = self.request.silenced();
                        self.follow(Some(effect));
                    }
                }
                Event::Gone { proven, later } => {
                    // The lanes and our own devices are gone.
                    self.is_proven = proven;
                    if self.request.route() == Route::Read {
                        self.in_flight.clear();
                    }
                    let proof_until = later.then_some(self.now + FENCE);
                    let error = TransferError::PeerGone;
                    let loss = Loss { error, is_proven: proven, proof_until };
                    let effect = self.request.session_lost(&loss, false);
                    self.follow(Some(effect));
                    if !self.is_over {
                        self.is_proven |= later;
                        let effect = self.request.proof_over(later);
                        self.follow(Some(effect));
                    }
                    assert!(self.is_over, "nothing waits for ever");
                }
                Event::Answer(_) | Event::Refuse(_) | Event::Lose(_) => {}
            }
        }
    }

    proptest! {
        #[test]
        fn no_schedule_breaks_a_promise(
            route in prop_oneof![
                Just(Route::Write), Just(Route::Read), Just(Route::Pull), Just(Route::SignalOnly)
            ],
            len in 1u64..20,
            notify: bool,
            counts: bool,
            is_unordered: bool,
            events in prop::collection::vec(event(), 0..60),
        ) {
            let bare = route == Route::SignalOnly;
            let signal = SignalDue { notify: notify || bare, count: counts.then_some(7) };
            let unordered = is_unordered && route == Route::Write;
            let mut observed = Observed::new(route, len, signal, unordered);
            for event in events {
                if observed.is_over {
                    break;
                }
                observed.happen(event);
            }
            // Whatever happened, a deadline or the end of the session ends it.
            for event in [Event::Pass(2 * DEADLINE), Event::Pass(2 * FENCE)] {
                if !observed.is_over && observed.ended.is_none() {
                    observed.happen(event);
                }
            }
            prop_assert!(observed.ended.is_some());
            if !observed.is_over {
                observed.happen(Event::Gone { proven: false, later: false });
            }
        }
    }
}
