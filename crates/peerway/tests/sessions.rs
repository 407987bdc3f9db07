//! Two endpoints have one session, whichever way they connect.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use peerway::{Access, ConnectError, Endpoint, Peer, Pin};

const ROUNDS: usize = 60;

#[derive(Clone, Copy, Debug)]
enum By {
    Address,
    Metadata,
}

impl By {
    fn connect(self, from: &Endpoint, to: &Endpoint) -> Result<Peer, ConnectError> {
        match self {
            Self::Address => from.connect_addr(to.addresses()[0]),
            Self::Metadata => from.connect(&to.metadata()),
        }
    }
}

#[test]
fn both_open_at_the_same_moment_and_get_one_session() {
    for pin in [Pin::Auto, Pin::LocalRing, Pin::Tcp] {
        for (ours, theirs) in [(By::Address, By::Address), (By::Address, By::Metadata)] {
            for round in 0..ROUNDS {
                let told = format!("{pin}, {ours:?} and {theirs:?}, round {round}");
                let new = || Endpoint::builder().transport(pin).build().unwrap();
                let (a, b) = (new(), new());
                let start = Barrier::new(2);
                let there = || {
                    start.wait();
                    theirs.connect(&b, &a)
                };
                let (from_a, from_b) = std::thread::scope(|scope| {
                    let there = scope.spawn(there);
                    start.wait();
                    (ours.connect(&a, &b), there.join().unwrap())
                });
                let (to_b, to_a) = (from_a.expect(&told), from_b.expect(&told));
                // Exactly one of the two endpoints accepted a session.
                let accepted = [&a, &b].map(|e| e.accept(Duration::ZERO).is_ok());
                assert!(accepted[0] != accepted[1], "accepted: {accepted:?}; {told}");
                assert_eq!(a.connect(&b.metadata()).unwrap(), to_b, "{told}");
                assert_eq!(b.connect(&a.metadata()).unwrap(), to_a, "{told}");
                to_b.notify(b"from a").unwrap().join().ok().expect(&told);
                to_a.notify(b"from b").unwrap().join().ok().expect(&told);
            }
        }
    }
}

#[test]
fn many_threads_of_both_share_one_session() {
    for round in 0..ROUNDS {
        let (a, b) = (Endpoint::new().unwrap(), Endpoint::new().unwrap());
        let start = Barrier::new(6);
        let peers: Vec<Vec<Peer>> = std::thread::scope(|scope| {
            let sides = [(&a, &b), (&b, &a)].map(|(from, to)| {
                let connect = || {
                    start.wait();
                    By::Address.connect(from, to).unwrap()
                };
                [(); 3].map(|()| scope.spawn(connect))
            });
            sides.into_iter().map(|s| s.into_iter().map(|t| t.join().unwrap()).collect()).collect()
        });
        for side in peers {
            assert!(side.iter().all(|peer| *peer == side[0] && peer.is_alive()), "round {round}");
        }
    }
}

/// An import that arrives just as the progress thread blocks must not wait for a heartbeat. With
/// heartbeats minutes apart, such an import timed out.
#[test]
fn a_progress_thread_does_not_block_with_an_import_pending() {
    let new = || {
        Endpoint::builder()
            .transport(Pin::LocalMap)
            .spin(Duration::from_micros(20))
            .detect(Duration::from_secs(600))
            .build()
            .unwrap()
    };
    let (ours, theirs) = (new(), new());
    let peer = ours.connect(&theirs.metadata()).unwrap();
    let owned = theirs.allocate(4096).unwrap();
    let questions = 20_000;
    for at in 0..questions {
        let descriptor = owned.advertise(Access::READ).unwrap();
        // From before the end of its spinning to well after it.
        let pause = Duration::from_nanos(at % 200 * 400);
        let before = Instant::now();
        while before.elapsed() < pause {
            std::hint::spin_loop();
        }
        let asked = Instant::now();
        peer.import(&descriptor).unwrap_or_else(|error| panic!("import {at}: {error}"));
        let took = asked.elapsed();
        assert!(took < Duration::from_secs(30), "import {at} took {took:?}");
    }
}
