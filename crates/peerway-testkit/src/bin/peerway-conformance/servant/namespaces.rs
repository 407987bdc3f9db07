//! A peer in its own namespaces.

use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

/// Serves in new namespaces. This process creates them and runs itself again inside, because a new
/// PID namespace takes effect only for the next child.
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
    // SAFETY: unshare takes no pointers. It moves this process, which has one thread, to new
    // namespaces.
    if unsafe { libc::unshare(flags) } != 0 {
        println!("err creating namespaces is not permitted: {}", std::io::Error::last_os_error());
        return ExitCode::FAILURE;
    }
    println!("ok apart");
    let mut command = Command::new("/proc/self/exe");
    command.arg("--serve");
    // SAFETY: prctl is a plain system call that allocates nothing, so it may run between fork and
    // exec.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        });
    }
    match command.status() {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            println!("err cannot start the peer inside the namespaces: {error}");
            ExitCode::FAILURE
        }
    }
}
