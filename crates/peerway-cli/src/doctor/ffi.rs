//! System calls without a safe wrapper in this program's dependencies.

use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Reads a word of this process through `process_vm_readv`, as a peer would read it.
///
/// Yama always allows a process to read itself, so a failure means that the call is missing or
/// filtered.
pub(super) fn cma_on_itself() -> io::Result<()> {
    let source = 0x5eed_u64;
    let mut copy = 0_u64;
    let len = size_of::<u64>();
    let local = libc::iovec { iov_base: (&raw mut copy).cast(), iov_len: len };
    let remote = libc::iovec { iov_base: (&raw const source).cast_mut().cast(), iov_len: len };
    // SAFETY: both vectors have one entry, which covers a live local of `len` bytes. The kernel
    // writes only to `copy`.
    let moved = unsafe { libc::process_vm_readv(libc::getpid(), &local, 1, &remote, 1, 0) };
    if moved < 0 {
        return Err(io::Error::last_os_error());
    }
    // The kernel wrote `copy` through a raw pointer, so this reads it through one too.
    // SAFETY: `copy` is a live, initialised local.
    let copy = unsafe { (&raw const copy).read_volatile() };
    if usize::try_from(moved) == Ok(len) && copy == source {
        Ok(())
    } else {
        Err(io::Error::other("process_vm_readv returned incomplete or wrong bytes"))
    }
}

/// The addresses of this machine, each with the name of its interface.
pub(super) fn addresses() -> io::Result<Vec<(String, IpAddr)>> {
    let mut head: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: `head` is a live local that receives the list's address.
    if unsafe { libc::getifaddrs(&mut head) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut found = Vec::new();
    let mut next = head;
    while !next.is_null() {
        // SAFETY: `next` is an entry of the list, which is freed only after the loop.
        let entry = unsafe { &*next };
        next = entry.ifa_next;
        if entry.ifa_name.is_null() || entry.ifa_addr.is_null() {
            continue;
        }
        // SAFETY: `getifaddrs` gives each entry a NUL-terminated name, which lives as long as the
        // list.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) }.to_string_lossy().into_owned();
        // SAFETY: the address is not null, and every socket address begins with its family.
        let address = match i32::from(unsafe { (*entry.ifa_addr).sa_family }) {
            libc::AF_INET => {
                // SAFETY: the family says that this is a `sockaddr_in`.
                let address =
                    unsafe { entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned() };
                IpAddr::V4(Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr)))
            }
            libc::AF_INET6 => {
                // SAFETY: the family says that this is a `sockaddr_in6`.
                let address =
                    unsafe { entry.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned() };
                IpAddr::V6(Ipv6Addr::from(address.sin6_addr.s6_addr))
            }
            _ => continue,
        };
        found.push((name, address));
    }
    // SAFETY: `head` came from `getifaddrs`, and no reference into the list is left.
    unsafe { libc::freeifaddrs(head) };
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cma_copies_a_word_or_is_refused_by_the_kernel() {
        // Some containers filter the call.
        let refusals = [libc::EPERM, libc::EACCES, libc::ENOSYS].map(Some);
        if let Err(error) = cma_on_itself() {
            assert!(refusals.contains(&error.raw_os_error()), "{error}");
        }
    }

    #[test]
    fn every_address_has_a_name_and_one_is_loopback() {
        let found = addresses().unwrap();
        assert!(found.iter().all(|(name, _)| !name.is_empty()), "{found:?}");
        let loopback = ("lo".to_owned(), IpAddr::V4(Ipv4Addr::LOCALHOST));
        assert!(found.contains(&loopback), "{found:?}");
    }
}
