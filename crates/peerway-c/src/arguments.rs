//! Checks the arguments from C as far as possible: null, alignment, lengths, struct sizes,
//! encodings.
//!
//! The library cannot check that a pointer points to memory of the given length. The C contract
//! (see the crate's documentation) covers that.

use std::ffi::{CStr, c_char, c_void};
use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

use crate::status::{Answer, Failure, peerway_status};

/// A time-out that never expires.
pub const PEERWAY_FOREVER: u64 = u64::MAX;

/// No struct will ever be longer. A larger size is an uninitialised field.
const LONGEST: usize = 4096;
/// How often a wait checks whether its endpoint is closed, if the engine does not end the wait
/// itself.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// A struct whose first field is its size, as the C program knows it.
///
/// # Safety
///
/// The type is `repr(C)`, and its first field is `size: usize`. Padding after its last field has no
/// meaning. Every byte pattern is a valid value, and a field of zeros means "not given".
pub(crate) unsafe trait Versioned: Copy {
    /// Bytes of the first version. A smaller size is refused.
    const FIRST: usize;
    const NAME: &'static str;
    /// A struct never becomes shorter.
    const GROWS: () = assert!(Self::FIRST <= size_of::<Self>());
}

/// Reads a struct that C filled in. Fields that the C program does not know are zero. Fields that
/// this library does not know must be zero.
///
/// # Safety
///
/// `at` is null, or points to as many bytes as its `size` field says.
pub(crate) unsafe fn read<T: Versioned>(at: *const T) -> Answer<T> {
    // SAFETY: required of the caller.
    let size = unsafe { size_of_given(at) }?;
    let mut ours = MaybeUninit::<T>::zeroed();
    let known = size.min(size_of::<T>());
    // SAFETY: both have at least `known` bytes, and `ours` is a new local.
    unsafe { std::ptr::copy_nonoverlapping(at.cast::<u8>(), ours.as_mut_ptr().cast(), known) };
    // SAFETY: the struct has `size` bytes, as required of the caller.
    let rest = unsafe { std::slice::from_raw_parts(at.cast::<u8>().add(known), size - known) };
    if rest.iter().any(|byte| *byte != 0) {
        let sentence = format!("{} has fields set that this library does not know", T::NAME);
        return Err(Failure::new(peerway_status::BadSize, sentence));
    }
    // SAFETY: `Versioned` guarantees that every byte pattern is a valid value.
    Ok(unsafe { ours.assume_init() })
}

/// As [`read`], but null gives `None`.
///
/// # Safety
///
/// As for [`read`].
pub(crate) unsafe fn read_if_any<T: Versioned>(at: *const T) -> Answer<Option<T>> {
    // SAFETY: required of the caller.
    if at.is_null() { Ok(None) } else { unsafe { read(at) }.map(Some) }
}

/// A struct of C to fill in. It receives the fields that it knows, and zeros in fields that this
/// library does not know. Its `size` field stays.
pub(crate) struct Fill<T> {
    at: *mut T,
    size: usize,
}

impl<T: Versioned> Fill<T> {
    /// # Safety
    ///
    /// Until `set`, `at` is null, or points to as many writable bytes as its `size` field says.
    pub(crate) unsafe fn new(at: *mut T) -> Answer<Self> {
        // SAFETY: required of the caller.
        let size = unsafe { size_of_given(at) }?;
        Ok(Self { at, size })
    }

    /// # Safety
    ///
    /// As for [`Self::new`], but null gives `None`: the C caller does not want the result.
    pub(crate) unsafe fn if_any(at: *mut T) -> Answer<Option<Self>> {
        // SAFETY: required of the caller.
        if at.is_null() { Ok(None) } else { unsafe { Self::new(at) }.map(Some) }
    }

    pub(crate) fn set(self, value: T) {
        let head = size_of::<usize>();
        let known = self.size.min(size_of::<T>());
        let to = self.at.cast::<u8>();
        // SAFETY: the caller of `new` guarantees that the struct has `size` bytes. Only bytes after
        // the `size` field are written.
        unsafe {
            let from = std::ptr::from_ref(&value).cast::<u8>();
            std::ptr::copy_nonoverlapping(from.add(head), to.add(head), known - head);
            std::ptr::write_bytes(to.add(known), 0, self.size - known);
        }
    }
}

/// # Safety
///
/// `at` is null, or its `size` field can be read.
unsafe fn size_of_given<T: Versioned>(at: *const T) -> Answer<usize> {
    const { T::GROWS };
    check(at, T::NAME)?;
    // SAFETY: `check` has tested the alignment. The rest is required of the caller.
    let size = unsafe { at.cast::<usize>().read() };
    if (T::FIRST..=LONGEST).contains(&size) {
        return Ok(size);
    }
    let (name, first, ours) = (T::NAME, T::FIRST, size_of::<T>());
    let sentence = format!(
        "the size field of {name} is given as {size}: set it to sizeof({name}), which is {ours} in \
         this version and at least {first} in every version"
    );
    Err(Failure::new(peerway_status::BadSize, sentence))
}

fn check<T>(at: *const T, name: &str) -> Answer {
    if at.is_null() {
        return Err(Failure::new(peerway_status::NullArgument, format!("{name} is null")));
    }
    if !at.is_aligned() {
        return Err(Failure::bad(format!("{name} is {at:p}, which is not aligned for its type")));
    }
    Ok(())
}

/// The place of a result.
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// A place that must not be null. It holds `start` if the call fails.
    ///
    /// # Safety
    ///
    /// Until `set`, `at` is null or writable.
    pub(crate) unsafe fn new(at: *mut T, name: &str, start: T) -> Answer<Self> {
        check(at, name)?;
        // SAFETY: `check` has tested null and alignment. The rest is required of the caller.
        unsafe { at.write(start) };
        Ok(Self(at))
    }

    pub(crate) fn set(self, value: T) {
        // SAFETY: the caller of `new` guarantees that the place is writable until now.
        unsafe { self.0.write(value) };
    }
}

/// The place of a resulting handle. It holds null if the call fails.
///
/// # Safety
///
/// As for [`Out::new`].
pub(crate) unsafe fn handle<H>(at: *mut *mut H, name: &str) -> Answer<Out<*mut H>> {
    // SAFETY: required of the caller.
    unsafe { Out::new(at, name, std::ptr::null_mut()) }
}

/// A list. It is empty if `count` is zero.
///
/// # Safety
///
/// If `count` is not zero and `at` is not null, `at` points to `count` values, and no code changes
/// them while the result is used.
pub(crate) unsafe fn list<'a, T>(at: *const T, count: usize, name: &str) -> Answer<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    check(at, name)?;
    if count.checked_mul(size_of::<T>()).is_none_or(|bytes| bytes > isize::MAX as usize) {
        return Err(Failure::bad(format!("{name} cannot have {count} entries")));
    }
    // SAFETY: the pointer is not null and aligned, and the length does not overflow. The rest is
    // required of the caller.
    Ok(unsafe { std::slice::from_raw_parts(at, count) })
}

/// Bytes.
///
/// # Safety
///
/// As for [`list`].
pub(crate) unsafe fn bytes<'a>(at: *const c_void, len: usize, name: &str) -> Answer<&'a [u8]> {
    // SAFETY: required of the caller.
    unsafe { list(at.cast(), len, name) }
}

/// A text. Null gives `None`.
///
/// # Safety
///
/// `at` is null, or a string that ends with a zero byte and stays valid while the result is used.
pub(crate) unsafe fn text<'a>(at: *const c_char, name: &str) -> Answer<Option<&'a str>> {
    if at.is_null() {
        return Ok(None);
    }
    // SAFETY: required of the caller.
    let text = unsafe { CStr::from_ptr(at) }.to_str();
    text.map(Some).map_err(|_| Failure::bad(format!("{name} is not UTF-8")))
}

/// Copies bytes into a buffer of C, and sets `len` to their number whether or not they fit.
///
/// # Safety
///
/// `buffer` is null or writable for `room` bytes. `len` is null or writable.
pub(crate) unsafe fn give(
    what: &[u8],
    buffer: *mut c_void,
    room: usize,
    len: *mut usize,
) -> Answer {
    // SAFETY: required of the caller.
    unsafe { Out::new(len, "len", what.len()) }?;
    if what.len() > room {
        let sentence = format!("the buffer has {room} bytes, but {} are needed", what.len());
        return Err(Failure::new(peerway_status::TooSmall, sentence));
    }
    if what.is_empty() {
        return Ok(());
    }
    check(buffer.cast::<u8>(), "buffer")?;
    // SAFETY: the buffer has `room` bytes, as required of the caller, and `what` fits.
    unsafe { std::ptr::copy_nonoverlapping(what.as_ptr(), buffer.cast(), what.len()) };
    Ok(())
}

/// As [`give`], for a text. The terminating zero byte counts.
///
/// # Safety
///
/// As for [`give`].
pub(crate) unsafe fn give_text(
    text: &str,
    buffer: *mut c_char,
    room: usize,
    len: *mut usize,
) -> Answer {
    let mut bytes = text.as_bytes().to_vec();
    bytes.retain(|byte| *byte != 0);
    bytes.push(0);
    // SAFETY: required of the caller.
    unsafe { give(&bytes, buffer.cast(), room, len) }
}

/// A time. Zero means "not given" and gives `None`.
pub(crate) fn time(nanoseconds: u64) -> Option<Duration> {
    (nanoseconds != 0).then(|| Duration::from_nanos(nanoseconds))
}

/// Calls `ready` with short time-outs until it returns an answer. Returns PENDING when the time is
/// over.
pub(crate) fn until<T>(
    nanoseconds: u64,
    mut ready: impl FnMut(Duration) -> Option<Answer<T>>,
) -> Answer<T> {
    let timeout = Duration::from_nanos(nanoseconds);
    let deadline = Instant::now().checked_add(timeout).filter(|_| nanoseconds != PEERWAY_FOREVER);
    loop {
        let left = deadline.map_or(LOOK_EVERY, |at| at.saturating_duration_since(Instant::now()));
        if let Some(answer) = ready(left.min(LOOK_EVERY)) {
            return answer;
        }
        if left == Duration::ZERO {
            return Err(Failure::PENDING);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Two {
        size: usize,
        one: u32,
        two: u32,
    }

    // SAFETY: `repr(C)`, the size first, and only integers. The first version had only `one`.
    unsafe impl Versioned for Two {
        const FIRST: usize = 12;
        const NAME: &'static str = "struct two";
    }

    fn status<T>(answer: Answer<T>) -> peerway_status {
        answer.err().map_or(peerway_status::Ok, |failure| failure.status)
    }

    #[test]
    fn older_structs_are_read_with_zeros_and_newer_ones_if_they_say_nothing_new() {
        // The library does not read bytes beyond the end of an older struct.
        let older = Two { size: 12, one: 7, two: 99 };
        // SAFETY: the struct has `size` bytes.
        assert_eq!(unsafe { read(&older) }.unwrap(), Two { size: 12, one: 7, two: 0 });
        let mut newer = [0u64; 4];
        newer[0] = 32;
        newer[1] = 5 << 32 | 4;
        // SAFETY: the array has as many bytes as its first word says.
        let read_newer = |newer: &[u64; 4]| unsafe { read(newer.as_ptr().cast::<Two>()) };
        assert_eq!(read_newer(&newer).unwrap(), Two { size: 32, one: 4, two: 5 });
        newer[3] = 1 << 63;
        assert_eq!(status(read_newer(&newer)), peerway_status::BadSize);
        for size in [0, 8, 11, LONGEST + 1, usize::MAX] {
            let wrong = Two { size, one: 1, two: 1 };
            // SAFETY: the size is refused, so nothing after it is read.
            assert_eq!(status(unsafe { read(&wrong) }), peerway_status::BadSize);
        }
        let askew = (&raw const older).wrapping_byte_add(3);
        // SAFETY: one pointer is null and the other not aligned. Neither is read.
        let (null, askew) = unsafe { (read::<Two>(std::ptr::null()), read(askew)) };
        assert_eq!(
            (status(null), status(askew)),
            (peerway_status::NullArgument, peerway_status::BadArgument)
        );
    }

    #[test]
    fn structs_are_filled_as_far_as_they_are_known() {
        let value = Two { size: 0, one: 1, two: 2 };
        let mut older = Two { size: 12, one: 9, two: 9 };
        // SAFETY: the struct has `size` bytes.
        unsafe { Fill::new(&raw mut older) }.unwrap().set(value);
        assert_eq!(older, Two { size: 12, one: 1, two: 9 });
        let mut newer = [u64::MAX; 4];
        newer[0] = 24;
        // SAFETY: the array has as many bytes as its first word says.
        unsafe { Fill::new(newer.as_mut_ptr().cast::<Two>()) }.unwrap().set(value);
        assert_eq!(newer, [24, 2 << 32 | 1, 0, u64::MAX]);
    }

    #[test]
    fn buffers_that_are_too_small_are_told_what_is_needed() {
        let (mut buffer, mut len) = ([9u8; 4], 0);
        let at: *mut c_void = buffer.as_mut_ptr().cast();
        // SAFETY: `at` is null or the buffer, which has at least `room` bytes.
        let mut give_to = |at, room| unsafe { status(give(b"abcd", at, room, &mut len)) };
        assert_eq!(give_to(at, 3), peerway_status::TooSmall);
        assert_eq!(give_to(std::ptr::null_mut(), 4), peerway_status::NullArgument);
        assert_eq!(give_to(at, 4), peerway_status::Ok);
        assert_eq!((len, buffer), (4, *b"abcd"));
    }

    #[test]
    fn waits_end() {
        assert_eq!(status(until::<()>(0, |_| None)), peerway_status::Pending);
        assert_eq!(
            status(until::<()>(1_000_000, |left| {
                std::thread::sleep(left);
                None
            })),
            peerway_status::Pending
        );
        let mut rounds = 0;
        let third = until(PEERWAY_FOREVER, |_| {
            rounds += 1;
            (rounds == 3).then_some(Ok(()))
        });
        assert_eq!((status(third), rounds), (peerway_status::Ok, 3));
    }
}
