//! The service thread of a shard: it serves when nobody else does.
//!
//! While nobody drives it sleeps in epoll, and everything wakes it. While others drive it watches from aside: it looks every now and
//! then, so that not every arrival wakes two threads. Where devices carry everything, and what is under way needs no hand, it sleeps
//! *lightly* instead: what peers send wakes it, and its bell, but not what becomes of our own requests, which are the lenders' affair.

use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use super::baton::{Held as _, Taken};
use super::driver::Driver;
use super::shard::{LOOKS_PER_CLOCK, Seat, Shard, pause};
use super::staging::COPY_NAP;
use crate::clock;
use crate::transport::verbs::port::Hears;

/// How long the service thread leaves a driver alone that others keep taking.
const LENT_PAUSE: Duration = Duration::from_micros(250);
/// The longest that it does so where queue pairs carry the bytes of every session: what peers read and write
/// needs nobody here then. It wakes on a core that lenders, and where devices are emulated these too, need.
const LENT_PAUSE_BY_DEVICES: Duration = Duration::from_millis(1);
/// Pauses without a lender after which the service thread goes back to epoll.
const LENT_PAUSES: u32 = 4;
/// Looks at a driver that somebody has before the service thread pauses. Lenders have it most of the time: with 16 looks it
/// was found taken as often as not, so that the service thread woke twice as often as it had to.
const LOOKS: u32 = 128;
/// Looks with nothing to do for the service thread after which it sleeps lightly.
const QUIET_LOOKS: u32 = 16;
/// How many of them one with something to do takes back, or a light sleep that was disturbed.
const DISTURBED: u32 = 4;
/// How long it sleeps lightly: what a request of ours comes to that nobody waits for is seen as late, and deadlines too.
const LIGHT_SLEEP: Duration = Duration::from_millis(8);

/// How long there has been nothing for the service thread to do.
#[derive(Default)]
struct Quiet(u32);

impl Quiet {
    /// It looked, or slept, and was or was not of use.
    fn note(&mut self, quiet: bool) {
        self.0 =
            if quiet { (self.0 + 1).min(QUIET_LOOKS) } else { self.0.saturating_sub(DISTURBED) };
    }

    /// Whether it may as well sleep.
    fn is_enough(&self) -> bool {
        self.0 == QUIET_LOOKS
    }
}

impl Shard {
    /// The service thread.
    pub(super) fn serve(&self) {
        let (mut pauses, mut quiet) = (0, Quiet::default());
        let (mut pause_for, mut longest) = (LENT_PAUSE, LENT_PAUSE);
        let mut lent = (0, 0);
        while !self.stop.load(Ordering::SeqCst) {
            // Lenders of short transfers come and go, and by devices it is worth a moment to see that all is quiet.
            let looks = if longest == LENT_PAUSE { 1 } else { LOOKS };
            let Some(mut seat) = self.take_within(looks, std::thread::yield_now) else {
                pauses = LENT_PAUSES;
                std::thread::sleep(pause_for);
                pause_for = (pause_for * 2).min(longest);
                continue;
            };
            let Some(driver) = &mut seat.driver else { return };
            longest = if driver.is_by_devices() { LENT_PAUSE_BY_DEVICES } else { LENT_PAUSE };
            if self.is_lent(&mut lent) {
                // Somebody drives now and then: watch from aside, so that not every arrival wakes two
                // threads, and no post has to wake this one: that takes whoever posts 16 to 40 µs where
                // cores are virtual.
                pauses = LENT_PAUSES;
                pause_for = (pause_for * 2).min(longest);
            }
            self.wake_up(driver);
            let mut now = clock::now();
            let mut idle_since = now;
            let mut turns = 0u32;
            let spin = if pauses > 0 { 0 } else { self.spin.as_nanos() as u64 };
            loop {
                seat.drain();
                let Some(driver) = &mut seat.driver else { return };
                let progress = driver.turn(now);
                if progress {
                    idle_since = now;
                }
                let wanted =
                    self.lenders.load(Ordering::Relaxed) > 0 || self.stop.load(Ordering::Relaxed);
                if wanted || now.saturating_sub(idle_since) >= spin {
                    break;
                }
                pause(now.saturating_sub(idle_since));
                turns = turns.wrapping_add(1);
                if progress || turns.is_multiple_of(LOOKS_PER_CLOCK) {
                    now = clock::now();
                }
            }
            // It has come.
            seat.take_call();
            let Some(driver) = &mut seat.driver else { return };
            let sleep = driver.sleep_for(now);
            let copies = driver.has_copies();
            if pauses > 0 && !copies {
                quiet.note(driver.has_been_quiet());
                if quiet.is_enough() {
                    quiet.note(!self.sleep_lightly(seat, now));
                    // Unless somebody has lent itself meanwhile it sleeps as always next.
                    pauses = 0;
                    continue;
                }
                // Events are for who sleeps in epoll; this thread looks again by itself.
                driver.rest(if self.baton.is_dozing() { Hears::All } else { Hears::Nothing });
                drop(seat);
                pauses -= 1;
                std::thread::sleep(pause_for);
                continue;
            }
            pause_for = LENT_PAUSE;
            let ready = driver.rest(Hears::All);
            self.looks_at.store(clock::after(now, sleep), Ordering::Relaxed);
            let may_sleep = self.baton.lie_down(seat, ready);
            pauses = 0;
            // The driver may have drained the bell that announced the stop.
            if copies {
                // A GPU rings no bell; epoll sleeps for a millisecond or not at all.
                std::thread::sleep(COPY_NAP);
            } else if may_sleep && !self.stop.load(Ordering::SeqCst) {
                self.wait_for_events(sleep);
            }
            self.baton.get_up();
        }
    }

    /// The service thread sleeps lightly while others drive; whether anything woke it.
    fn sleep_lightly(&self, mut seat: Taken<'_, Seat>, now: u64) -> bool {
        self.light.store(true, Ordering::SeqCst);
        // pairs with the one in `heed`
        fence(Ordering::SeqCst);
        let hears = if self.baton.is_dozing() { Hears::All } else { Hears::Arrivals };
        let ready = |driver: &mut Driver| !driver.is_tended() || driver.rest(hears);
        let ready = seat.driver.as_mut().is_none_or(ready) || seat.take_call();
        self.looks_at.store(clock::after(now, LIGHT_SLEEP), Ordering::Relaxed);
        let may_sleep = self.baton.lie_down(seat, ready) && !self.stop.load(Ordering::SeqCst);
        // As in `leave`.
        let may_sleep = may_sleep && (hears == Hears::All || !self.baton.is_dozing());
        let woken = !may_sleep || self.wait_for_events(LIGHT_SLEEP);
        self.baton.get_up();
        self.light.store(false, Ordering::SeqCst);
        woken
    }
}
