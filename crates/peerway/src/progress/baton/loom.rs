//! The same code over loom's atomics: every order of events the memory model allows.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p peerway --release --lib baton::loom`

use std::collections::VecDeque;
// Not loom's, which panics when it is dropped after a deadlock.
use std::sync::Arc;

use ::loom::cell::Cell;
use ::loom::model::Builder;
use ::loom::sync::atomic::{AtomicBool, Ordering, fence};
use ::loom::sync::{Mutex, Notify};
use ::loom::thread;

use super::*;

/// Bells keep a signal until somebody waits; loom reports a sleeper that nobody wakes as a deadlock.
struct Model {
    taken: AtomicBool,
    asleep: AtomicBool,
    dozing: AtomicBool,
    queue: Mutex<VecDeque<Letter>>,
    bell: Notify,
    dozer_bell: Notify,
    /// Whether whoever rings for the service thread is heard: one model must fail.
    heard: bool,
}

impl Model {
    fn new(heard: bool) -> Self {
        Self {
            taken: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            dozing: AtomicBool::new(false),
            queue: Mutex::default(),
            bell: Notify::new(),
            dozer_bell: Notify::new(),
            heard,
        }
    }

    fn flag(&self, flag: Flag) -> &AtomicBool {
        match flag {
            Flag::Taken => &self.taken,
            Flag::Asleep => &self.asleep,
            Flag::Dozing => &self.dozing,
        }
    }
}

impl Means<Letter> for Model {
    fn look(&self, flag: Flag) -> bool {
        self.flag(flag).load(Ordering::SeqCst)
    }

    fn glance(&self, flag: Flag) -> bool {
        // Before it is taken a look is only a hint, and may be out of date for as long as loom likes.
        flag != Flag::Taken && self.flag(flag).load(Ordering::Relaxed)
    }

    fn set(&self, flag: Flag, to: bool) {
        // loom lets a swap that comes after a store read what the store overwrote.
        self.flag(flag).swap(to, Ordering::SeqCst);
    }

    fn swap(&self, flag: Flag, to: bool) -> bool {
        self.flag(flag).swap(to, Ordering::SeqCst)
    }

    fn let_go(&self) {
        // As in `set`.
        self.taken.swap(false, Ordering::Release);
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }

    fn ring(&self, sleeper: Sleeper) {
        match sleeper {
            Sleeper::Service if self.heard => self.bell.notify(),
            Sleeper::Service => {}
            Sleeper::Dozer => self.dozer_bell.notify(),
        }
    }

    fn push(&self, letter: Letter) {
        self.queue.lock().unwrap().push_back(letter);
    }

    fn pop(&self) -> Option<Letter> {
        self.queue.lock().unwrap().pop_front()
    }

    fn is_empty(&self) -> bool {
        self.queue.lock().unwrap().is_empty()
    }
}

/// A command that leaves something to do, or one that is done with.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Letter {
    ToSend,
    Sent,
}

/// As the driver: a command leaves something to send, which somebody must come for. Its cells are watched for
/// races.
struct Post {
    to_send: Cell<u32>,
    sent: Cell<u32>,
    news: Cell<bool>,
    /// As the end of a transfer, which whoever waits for it looks at by itself.
    over: Arc<AtomicBool>,
}

impl Held for Post {
    type Command = Letter;

    fn carry_out(&mut self, letter: Letter) {
        self.to_send.set(self.to_send.get() + u32::from(letter == Letter::ToSend));
        self.news.set(true);
        self.over.store(true, Ordering::Release);
    }

    fn take_news(&mut self) -> bool {
        self.news.replace(false)
    }

    fn take_call(&mut self) -> bool {
        false
    }
}

type Office = Arc<Baton<Post, Model>>;

fn office(heard: bool) -> Office {
    let over = Arc::new(AtomicBool::new(false));
    let (to_send, sent, news) = (Cell::new(0), Cell::new(0), Cell::new(false));
    Arc::new(Baton::new(Post { to_send, sent, news, over }, Model::new(heard)))
}

/// As the service thread, until so many have been sent.
fn serve(office: &Office, until: u32) {
    loop {
        let Some(mut taken) = office.try_take() else {
            thread::yield_now();
            continue;
        };
        taken.drain();
        let to_send = taken.to_send.replace(0);
        taken.sent.set(taken.sent.get() + to_send);
        if taken.sent.get() == until {
            return;
        }
        let ready = taken.to_send.get() > 0;
        if office.lie_down(taken, ready) {
            office.means.bell.wait();
        }
        office.get_up();
    }
}

fn explore(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

fn posted_is_sent(heard: bool) {
    explore(move || {
        let office = office(heard);
        let posters = [(); 2].map(|()| {
            let office = office.clone();
            thread::spawn(move || {
                office.submit(Letter::ToSend);
                office.kick();
            })
        });
        serve(&office, 2);
        posters.into_iter().for_each(|poster| poster.join().unwrap());
    });
}

#[test]
fn whoever_needs_nobody_leaves_nothing_of_others() {
    explore(|| {
        let office = office(true);
        let poster = {
            let office = office.clone();
            thread::spawn(move || {
                office.submit(Letter::ToSend);
                office.kick();
            })
        };
        let in_passing = {
            let office = office.clone();
            thread::spawn(move || office.submit(Letter::Sent))
        };
        serve(&office, 1);
        poster.join().unwrap();
        in_passing.join().unwrap();
    });
}

#[test]
fn the_service_thread_never_sleeps_over_a_command() {
    posted_is_sent(true);
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_its_bell_it_does() {
    posted_is_sent(false);
}

#[test]
fn a_thread_that_dozes_hears_the_news() {
    explore(|| {
        let office = office(true);
        let over = office.try_take().map(|post| post.over.clone()).unwrap();
        let is_over = || over.load(Ordering::Acquire);
        let poster = {
            let office = office.clone();
            thread::spawn(move || office.submit(Letter::ToSend))
        };
        while !is_over() {
            office.doze(is_over, || office.means.dozer_bell.wait());
        }
        poster.join().unwrap();
    });
}
