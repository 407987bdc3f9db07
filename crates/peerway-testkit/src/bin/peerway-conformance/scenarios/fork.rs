//! In a forked child, the endpoint reports that it belongs to the parent. The parent is not
//! disturbed.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use peerway::{AcceptError, Access, Batch, ConnectError, PostError, RegisterError};

use crate::healthy::Healthy;
use crate::world::{Verdict, World, fine};

pub(crate) fn run(world: &World) -> Result<Verdict> {
    let mut pair = world.pair()?;
    let healthy = Healthy::start(world, &pair.a)?;
    let remote = pair.theirs("r", 1 << 20, world.memory(), 1)?;
    let ours = world.region(&pair.a, 1 << 20)?;
    let batch = Batch::write(&ours.all(), &remote.all())?;
    let metadata = pair.b.metadata.clone();
    for leave in ["at once", "after dropping everything"] {
        world.step(leave);
        // SAFETY: the child calls only engine functions that are documented to work after a fork,
        // and leaves by `_exit`.
        match unsafe { libc::fork() } {
            -1 => bail!("fork: {}", std::io::Error::last_os_error()),
            0 => {
                let mut wrong = 0;
                wrong |= i32::from(!matches!(pair.peer.post(&batch), Err(PostError::Forked)));
                wrong |=
                    2 * i32::from(!matches!(pair.a.connect(&metadata), Err(ConnectError::Forked)));
                wrong |=
                    4 * i32::from(!matches!(pair.a.allocate(4096), Err(RegisterError::Forked)));
                let accepted = pair.a.accept(Duration::from_millis(1));
                wrong |= 8 * i32::from(!matches!(accepted, Err(AcceptError::Forked)));
                wrong |= 16 * i32::from(!matches!(pair.peer.notify(b"x"), Err(PostError::Forked)));
                if leave != "at once" {
                    // SAFETY: each value is read once and never used again, because the child exits
                    // below.
                    unsafe {
                        drop(std::ptr::read(&raw const ours));
                        drop(std::ptr::read(&raw const remote));
                        drop(std::ptr::read(&raw const pair.peer));
                        drop(std::ptr::read(&raw const pair.a));
                    }
                }
                // SAFETY: `_exit` ends the child without running the parent's exit handlers.
                unsafe { libc::_exit(wrong) }
            }
            child => {
                let status = wait_for(child, world.profile.slack)?;
                ensure!(
                    libc::WIFEXITED(status),
                    "the child did not exit by itself: wait status {status:#x}"
                );
                let wrong = libc::WEXITSTATUS(status);
                ensure!(wrong == 0, "calls in the child did not return Forked: bits {wrong:#b}");
            }
        }
        world.step("the parent continues");
        pair.peer.run(&batch)?.ok()?;
        ensure!(pair.peer.is_alive(), "the session did not survive the fork");
        let again = pair.theirs("r2", 4096, world.memory(), 1)?;
        pair.peer.read(&ours.slice(0..4096), &again.all())?;
        ours.advertise(Access::READ)?;
    }
    healthy.finish(world)?;
    fine()
}

fn wait_for(child: i32, within: Duration) -> Result<i32> {
    let until = std::time::Instant::now() + within;
    loop {
        let mut status = 0;
        // SAFETY: `status` is a valid int, and the child was forked by this process.
        if unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) } == child {
            return Ok(status);
        }
        if std::time::Instant::now() >= until {
            // SAFETY: `child` was forked by this process and is not reaped, so the number is still
            // its own.
            unsafe { libc::kill(child, libc::SIGKILL) };
            bail!("the forked child hangs");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}
