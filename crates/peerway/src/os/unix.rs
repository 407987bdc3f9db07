//! Local sockets that pass file descriptors between peers on one host: AF_UNIX, SOCK_SEQPACKET,
//! abstract names.
//!
//! Sequenced packets keep bytes and file descriptors together and need no framing. Abstract names
//! leave no file behind and belong to the network namespace. All returned sockets are non-blocking
//! and close-on-exec. Only [`connect`] blocks, for at most [`CONNECT_WITHIN`]. Used by the
//! handshake of the local transports.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::io::{Errno, retry_on_intr};
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

/// The longest packet that [`recv`] accepts. Set-up messages are a few hundred bytes.
pub(crate) const MAX_BYTES: usize = 4096;

/// The maximum number of file descriptors in one packet: two rings, their event descriptors, and
/// some spare.
pub(crate) const MAX_FDS: usize = 8;

/// How long [`connect`] waits for a listener whose backlog is full. A stopped listener would block
/// it forever.
const CONNECT_WITHIN: Duration = Duration::from_secs(1);

/// One message with its file descriptors.
#[derive(Debug)]
pub(crate) struct Packet {
    pub(crate) bytes: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
}

/// The result of [`recv`].
#[derive(Debug)]
pub(crate) enum Received {
    Packet(Packet),
    /// A packet whose file descriptors were lost, because this process cannot open more files.
    Cut(Vec<u8>),
    WouldBlock,
    Closed,
}

/// The process at the other end when it called `connect` or `listen`, as the kernel reports it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Credentials {
    /// 0 if the process is not visible in this PID namespace.
    pub(crate) pid: u32,
    /// The overflow uid (65534) if the user does not exist in this user namespace.
    pub(crate) uid: u32,
}

/// Listens on the abstract `name`.
pub(crate) fn listen(name: &str) -> io::Result<OwnedFd> {
    let socket = socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    rustix::net::bind(&socket, &address(name)?)?;
    // Each peer process connects once, so the backlog only has to hold the processes of one host at
    // start-up.
    rustix::net::listen(&socket, 128)?;
    Ok(socket)
}

/// Accepts the next connection; `None` if there is none yet.
pub(crate) fn accept(listener: BorrowedFd<'_>) -> io::Result<Option<OwnedFd>> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    match retry_on_intr(|| rustix::net::accept_with(listener, flags)) {
        Ok(socket) => Ok(Some(socket)),
        Err(Errno::AGAIN) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Connects to the listener on the abstract `name`, within `timeout` or one second, whichever is
/// less.
pub(crate) fn connect(name: &str, timeout: Duration) -> io::Result<OwnedFd> {
    let socket = socket(SocketFlags::CLOEXEC)?;
    // A local connect only waits for room in the backlog. A timeout of zero would mean no timeout.
    let timeout = timeout.clamp(Duration::from_millis(1), CONNECT_WITHIN);
    sockopt::set_socket_timeout(&socket, Timeout::Send, Some(timeout))?;
    let address = address(name)?;
    match retry_on_intr(|| rustix::net::connect(&socket, &address)) {
        Ok(()) => {}
        Err(Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
        Err(error) => return Err(error.into()),
    }
    rustix::io::ioctl_fionbio(&socket, true)?;
    Ok(socket)
}

/// Asks the kernel for the process at the other end.
pub(crate) fn credentials(sock: BorrowedFd<'_>) -> io::Result<Credentials> {
    // Not through rustix, whose pid type excludes 0: a process outside our PID namespace has pid 0
    // here.
    let mut cred = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the option writes at most `len` bytes, the size of `cred`, and both outlive the call.
    let rc = unsafe {
        libc::getsockopt(
            sock.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut cred).cast(),
            &raw mut len,
        )
    };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Credentials { pid: u32::try_from(cred.pid).unwrap_or(0), uid: cred.uid })
}

/// Sends one packet, all or nothing. Returns false if the socket has no room now.
pub(crate) fn send(sock: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<bool> {
    // The receiver would take an empty packet for the end of the connection.
    if bytes.is_empty() || bytes.len() > MAX_BYTES || fds.len() > MAX_FDS {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "a local packet must have 1 to 4096 bytes and at most 8 file descriptors",
        ));
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        let fits = control.push(SendAncillaryMessage::ScmRights(fds));
        debug_assert!(fits, "the buffer holds MAX_FDS descriptors");
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    match retry_on_intr(|| rustix::net::sendmsg(sock, &[IoSlice::new(bytes)], &mut control, flags))
    {
        Ok(_) => Ok(true),
        Err(Errno::AGAIN) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Receives one packet. `InvalidData` if it is longer than [`MAX_BYTES`] or has more than
/// [`MAX_FDS`] file descriptors; the received descriptors are closed. Any other error is an error
/// of this process, not of the peer.
pub(crate) fn recv(sock: BorrowedFd<'_>) -> io::Result<Received> {
    let mut bytes = vec![0; MAX_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let got = match retry_on_intr(|| {
        rustix::net::recvmsg(sock, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)
    }) {
        Ok(got) => got,
        Err(Errno::AGAIN) => return Ok(Received::WouldBlock),
        Err(Errno::CONNRESET) => return Ok(Received::Closed),
        Err(error) => return Err(error.into()),
    };
    // Drain before any return, so that the file descriptors of a refused packet are closed here.
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    let is_cut = got.flags.contains(ReturnFlags::CTRUNC);
    // Also count them: alignment may leave space for one more in the buffer.
    let too_many = fds.len() > MAX_FDS || (is_cut && fds.len() == MAX_FDS);
    if got.flags.contains(ReturnFlags::TRUNC) || too_many {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "a local packet has more than 4096 bytes or 8 file descriptors",
        ));
    }
    if got.bytes == 0 {
        return Ok(Received::Closed);
    }
    bytes.truncate(got.bytes);
    // The kernel truncates the control data if it cannot install the file descriptors in this
    // process.
    Ok(if is_cut { Received::Cut(bytes) } else { Received::Packet(Packet { bytes, fds }) })
}

fn socket(flags: SocketFlags) -> io::Result<OwnedFd> {
    let (unix, packets) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    Ok(rustix::net::socket_with(unix, packets, flags, None)?)
}

fn address(name: &str) -> io::Result<SocketAddrUnix> {
    Ok(SocketAddrUnix::new_abstract_name(name.as_bytes())?)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    /// A connected pair, made with its own listener.
    fn pair(name: &str) -> (OwnedFd, OwnedFd) {
        let name = format!("peerway-test-{}-{name}", std::process::id());
        let listener = listen(&name).unwrap();
        assert!(accept(listener.as_fd()).unwrap().is_none());
        let near = connect(&name, CONNECT_WITHIN).unwrap();
        let far = accept(listener.as_fd()).unwrap().unwrap();
        (near, far)
    }

    fn packet(sock: &OwnedFd) -> Packet {
        match recv(sock.as_fd()).unwrap() {
            Received::Packet(packet) => packet,
            other => panic!("no packet: {other:?}"),
        }
    }

    #[test]
    fn bytes_and_descriptors_arrive_together() {
        let (near, far) = pair("together");
        let (read, write) = rustix::pipe::pipe().unwrap();
        assert!(send(near.as_fd(), b"one", &[write.as_fd()]).unwrap());
        assert!(send(near.as_fd(), b"two", &[]).unwrap());
        let one = packet(&far);
        assert_eq!((one.bytes.as_slice(), one.fds.len()), (b"one".as_slice(), 1));
        let flags = rustix::io::fcntl_getfd(&one.fds[0]).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        rustix::io::write(&one.fds[0], b"!").unwrap();
        let mut got = [0; 1];
        assert_eq!(rustix::io::read(&read, &mut got), Ok(1));
        let two = packet(&far);
        assert_eq!((two.bytes.as_slice(), two.fds.len()), (b"two".as_slice(), 0));
        assert!(matches!(recv(far.as_fd()), Ok(Received::WouldBlock)));
    }

    #[test]
    fn the_largest_packet_fits() {
        let (near, far) = pair("largest");
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
        assert!(send(near.as_fd(), &[5; MAX_BYTES], &[event.as_fd(); MAX_FDS]).unwrap());
        let got = packet(&far);
        assert_eq!((got.bytes.len(), got.fds.len()), (MAX_BYTES, MAX_FDS));
    }

    #[test]
    fn oversized_packets_are_refused_on_both_sides() {
        let (near, far) = pair("refused");
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
        assert!(send(near.as_fd(), &[0; MAX_BYTES + 1], &[]).is_err());
        assert!(send(near.as_fd(), b"x", &[event.as_fd(); MAX_FDS + 1]).is_err());
        assert!(send(near.as_fd(), b"", &[]).is_err());
        rustix::net::send(&near, &[0; MAX_BYTES + 1], SendFlags::empty()).unwrap();
        let error = recv(far.as_fd()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);

        let many = [event.as_fd(); MAX_FDS + 1];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS + 1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&many)));
        let flags = SendFlags::empty();
        rustix::net::sendmsg(&near, &[IoSlice::new(b"x")], &mut control, flags).unwrap();
        let error = recv(far.as_fd()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_full_socket_and_a_closed_one_are_told_apart() {
        let (near, far) = pair("full");
        let mut sent = 0;
        while send(near.as_fd(), &[0; MAX_BYTES], &[]).unwrap() {
            sent += 1;
        }
        assert!(sent > 0);
        drop(near);
        for _ in 0..sent {
            packet(&far);
        }
        assert!(matches!(recv(far.as_fd()), Ok(Received::Closed)));
        assert!(send(far.as_fd(), b"x", &[]).is_err());
    }

    #[test]
    fn the_kernel_reports_the_peers_credentials() {
        let (near, far) = pair("who");
        let here = (std::process::id(), rustix::process::geteuid().as_raw());
        for sock in [&near, &far] {
            let who = credentials(sock.as_fd()).unwrap();
            assert_eq!((who.pid, who.uid), here);
        }
    }

    #[test]
    fn connecting_without_a_listener_is_an_error() {
        let name = format!("peerway-test-{}-nobody", std::process::id());
        let refused = connect(&name, CONNECT_WITHIN).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        assert!(listen(&"x".repeat(200)).is_err());
    }

    #[test]
    fn a_name_is_taken_once() {
        let name = format!("peerway-test-{}-taken", std::process::id());
        let _first = listen(&name).unwrap();
        assert_eq!(listen(&name).unwrap_err().kind(), io::ErrorKind::AddrInUse);
    }
}
