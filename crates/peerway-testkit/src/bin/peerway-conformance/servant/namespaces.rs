//! A peer in namespaces of its own.

use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

/// Serves in new namespaces: this process makes them and runs itself again inside, since a new PID
/// namespace begins with the next child.
pub(crate) fn serve_apart(kinds: &[String]) -> ExitCode {
    let mut flags = 0;
    for kind in kinds {
        flags |= match kind.as_str() {
            "net" => libc::CLONE_NEWNET,
            "mount" => libc::CLONE_NEWNS,
            "pid" => libc::CLONE_NEWPID,
            "ipc" => libc::CLONE_NEWIPC,
            _ => 0,
        };
    }
    // SAFETY: moves this process, which has one thread, to new namespaces.
    if unsafe { libc::unshare(flags) } != 0 {
        println!("err not permitted: {}", std::io::Error::last_os_error());
        return ExitCode::FAILURE;
    }
    println!("ok apart");
    let mut command = Command::new("/proc/self/exe");
    command.arg("--serve");
    // SAFETY: prctl is a plain system call, allowed between fork and exec.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        });
    }
    match command.status() {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            println!("err cannot run again inside: {error}");
            ExitCode::FAILURE
        }
    }
}
