//! What C passes, checked as far as that can be done: null, alignment, lengths, sizes of structs, encodings.
//!
//! That a pointer which is none of these leads to memory of the length it is said to have is the caller's promise, as everywhere in C.

use std::ffi::{CStr, c_char, c_void};
use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

use crate::status::{Answer, Failure, peerway_status};

/// A time-out that never passes.
pub const PEERWAY_FOREVER: u64 = u64::MAX;

/// No struct of ours will be longer; a size beyond it was never set.
const LONGEST: usize = 4096;
/// How long a wait that the engine does not end by itself goes without a look at whether its endpoint still lives.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// A struct whose first field is its size, as its user knows it.
///
/// # Safety
///
/// The type is `repr(C)`, its first field is `size: usize`, it has no padding after its last field's end that matters, and every
/// pattern of bytes is a value of it, all zeros meaning "as if not given".
pub(crate) unsafe trait Versioned: Copy {
    /// Bytes of the first version: what must be there.
    const FIRST: usize;
    const NAME: &'static str;
    /// A struct never becomes shorter.
    const GROWS: () = assert!(Self::FIRST <= size_of::<Self>());
}

/// Reads a struct that C filled in. Fields that its user does not know of are zero; fields that we do not know of must be.
///
/// # Safety
///
/// `at` is null, or leads to as many bytes as the size in its beginning says.
pub(crate) unsafe fn read<T: Versioned>(at: *const T) -> Answer<T> {
    // SAFETY: the caller's promise.
    let size = unsafe { size_of_given(at) }?;
    let mut ours = MaybeUninit::<T>::zeroed();
    let known = size.min(size_of::<T>());
    // SAFETY: both are at least that long, and not the same memory.
    unsafe { std::ptr::copy_nonoverlapping(at.cast::<u8>(), ours.as_mut_ptr().cast(), known) };
    // SAFETY: as long as was said.
    let rest = unsafe { std::slice::from_raw_parts(at.cast::<u8>().add(known), size - known) };
    if rest.iter().any(|byte| *byte != 0) {
        let sentence = format!("{} has fields set that this library does not know", T::NAME);
        return Err(Failure::new(peerway_status::BadSize, sentence));
    }
    // SAFETY: every pattern of bytes is a value.
    Ok(unsafe { ours.assume_init() })
}

/// As [`read`], where null means that nothing was given.
///
/// # Safety
///
/// As there.
pub(crate) unsafe fn read_if_any<T: Versioned>(at: *const T) -> Answer<Option<T>> {
    // SAFETY: the caller's promise.
    if at.is_null() { Ok(None) } else { unsafe { read(at) }.map(Some) }
}

/// A struct of C's to be filled in: as much of ours as it knows of, zeros where it knows of more. Its size stays.
pub(crate) struct Fill<T> {
    at: *mut T,
    size: usize,
}

impl<T: Versioned> Fill<T> {
    /// # Safety
    ///
    /// `at` is null, or leads to as many writable bytes as the size in its beginning says, until `set`.
    pub(crate) unsafe fn new(at: *mut T) -> Answer<Self> {
        // SAFETY: the caller's promise.
        let size = unsafe { size_of_given(at) }?;
        Ok(Self { at, size })
    }

    /// # Safety
    ///
    /// As for [`Self::new`], where null means that nobody wants to know.
    pub(crate) unsafe fn if_any(at: *mut T) -> Answer<Option<Self>> {
        // SAFETY: the caller's promise.
        if at.is_null() { Ok(None) } else { unsafe { Self::new(at) }.map(Some) }
    }

    pub(crate) fn set(self, value: T) {
        let head = size_of::<usize>();
        let known = self.size.min(size_of::<T>());
        let to = self.at.cast::<u8>();
        // SAFETY: `new`'s caller promised that the struct is as long as it says; only what lies behind the size is written.
        unsafe {
            let from = std::ptr::from_ref(&value).cast::<u8>();
            std::ptr::copy_nonoverlapping(from.add(head), to.add(head), known - head);
            std::ptr::write_bytes(to.add(known), 0, self.size - known);
        }
    }
}

/// # Safety
///
/// `at` is null, or a size can be read there.
unsafe fn size_of_given<T: Versioned>(at: *const T) -> Answer<usize> {
    const { T::GROWS };
    check(at, T::NAME)?;
    // SAFETY: aligned, and the caller's promise.
    let size = unsafe { at.cast::<usize>().read() };
    if (T::FIRST..=LONGEST).contains(&size) {
        return Ok(size);
    }
    let (name, first, ours) = (T::NAME, T::FIRST, size_of::<T>());
    let sentence = format!(
        "the size of {name} is given as {size}: set it to sizeof({name}), which is {ours} here and never less than {first}"
    );
    Err(Failure::new(peerway_status::BadSize, sentence))
}

fn check<T>(at: *const T, name: &str) -> Answer {
    if at.is_null() {
        return Err(Failure::new(peerway_status::NullArgument, format!("{name} is null")));
    }
    if !at.is_aligned() {
        return Err(Failure::bad(format!(
            "{name} is at {at:p}, which is not aligned for its type"
        )));
    }
    Ok(())
}

/// Where a result goes.
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// A place that must be there; `start` is what it holds where the call fails.
    ///
    /// # Safety
    ///
    /// `at` is null, or can be written until `set`.
    pub(crate) unsafe fn new(at: *mut T, name: &str, start: T) -> Answer<Self> {
        check(at, name)?;
        // SAFETY: aligned, and the caller's promise.
        unsafe { at.write(start) };
        Ok(Self(at))
    }

    pub(crate) fn set(self, value: T) {
        // SAFETY: as promised to `new`.
        unsafe { self.0.write(value) };
    }
}

/// A place for a handle.
///
/// # Safety
///
/// As for [`Out::new`].
pub(crate) unsafe fn handle<H>(at: *mut *mut H, name: &str) -> Answer<Out<*mut H>> {
    // SAFETY: the caller's promise.
    unsafe { Out::new(at, name, std::ptr::null_mut()) }
}

/// A list.
///
/// # Safety
///
/// Where `count` is not zero and `at` not null, so many values are there while the result is used, and nobody changes them.
pub(crate) unsafe fn list<'a, T>(at: *const T, count: usize, name: &str) -> Answer<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    check(at, name)?;
    if count.checked_mul(size_of::<T>()).is_none_or(|bytes| bytes > isize::MAX as usize) {
        return Err(Failure::bad(format!("{name} cannot have {count} entries")));
    }
    // SAFETY: not null, aligned, not too long, and the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(at, count) })
}

/// Bytes.
///
/// # Safety
///
/// As for [`list`].
pub(crate) unsafe fn bytes<'a>(at: *const c_void, len: usize, name: &str) -> Answer<&'a [u8]> {
    // SAFETY: the caller's promise.
    unsafe { list(at.cast(), len, name) }
}

/// A text, or none for null.
///
/// # Safety
///
/// Null, or a string that ends with a zero byte and stays while the result is used.
pub(crate) unsafe fn text<'a>(at: *const c_char, name: &str) -> Answer<Option<&'a str>> {
    if at.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(at) }.to_str();
    text.map(Some).map_err(|_| Failure::bad(format!("{name} is not UTF-8")))
}

/// Copies bytes into a buffer of C's and says how many there are, whether or not they fit.
///
/// # Safety
///
/// `buffer` can be written for `room` bytes, and `len`, where it is not null, too.
pub(crate) unsafe fn give(
    what: &[u8],
    buffer: *mut c_void,
    room: usize,
    len: *mut usize,
) -> Answer {
    // SAFETY: the caller's promise.
    unsafe { Out::new(len, "len", what.len()) }?;
    if what.len() > room {
        let sentence = format!("the buffer has {room} bytes, and {} are needed", what.len());
        return Err(Failure::new(peerway_status::TooSmall, sentence));
    }
    if what.is_empty() {
        return Ok(());
    }
    check(buffer.cast::<u8>(), "buffer")?;
    // SAFETY: the caller's promise; it fits.
    unsafe { std::ptr::copy_nonoverlapping(what.as_ptr(), buffer.cast(), what.len()) };
    Ok(())
}

/// As [`give`], for a text: a zero byte goes behind it, and counts.
///
/// # Safety
///
/// As there.
pub(crate) unsafe fn give_text(
    text: &str,
    buffer: *mut c_char,
    room: usize,
    len: *mut usize,
) -> Answer {
    let mut bytes = text.as_bytes().to_vec();
    bytes.retain(|byte| *byte != 0);
    bytes.push(0);
    // SAFETY: the caller's promise.
    unsafe { give(&bytes, buffer.cast(), room, len) }
}

/// A time that is zero where it was not given.
pub(crate) fn time(nanoseconds: u64) -> Option<Duration> {
    (nanoseconds != 0).then(|| Duration::from_nanos(nanoseconds))
}

/// Asks `ready` for some time at once until it has an answer or the time is over, which is PENDING.
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

    // SAFETY: as the trait wants it; the first version had `one` alone.
    unsafe impl Versioned for Two {
        const FIRST: usize = 12;
        const NAME: &'static str = "struct two";
    }

    fn status<T>(answer: Answer<T>) -> peerway_status {
        answer.err().map_or(peerway_status::Ok, |failure| failure.status)
    }

    #[test]
    fn older_structs_are_read_with_zeros_and_newer_ones_if_they_say_nothing_new() {
        // Bytes beyond the end of an older struct are not looked at.
        let older = Two { size: 12, one: 7, two: 99 };
        // SAFETY: as long as it says.
        assert_eq!(unsafe { read(&older) }.unwrap(), Two { size: 12, one: 7, two: 0 });
        let mut newer = [0u64; 4];
        newer[0] = 32;
        newer[1] = 5 << 32 | 4;
        // SAFETY: as long as it says.
        let read_newer = |newer: &[u64; 4]| unsafe { read(newer.as_ptr().cast::<Two>()) };
        assert_eq!(read_newer(&newer).unwrap(), Two { size: 32, one: 4, two: 5 });
        newer[3] = 1 << 63;
        assert_eq!(status(read_newer(&newer)), peerway_status::BadSize);
        for size in [0, 8, 11, LONGEST + 1, usize::MAX] {
            let wrong = Two { size, one: 1, two: 1 };
            // SAFETY: refused by its size.
            assert_eq!(status(unsafe { read(&wrong) }), peerway_status::BadSize);
        }
        let askew = (&raw const older).wrapping_byte_add(3);
        // SAFETY: null, and not aligned: neither is read.
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
        // SAFETY: as long as it says.
        unsafe { Fill::new(&raw mut older) }.unwrap().set(value);
        assert_eq!(older, Two { size: 12, one: 1, two: 9 });
        let mut newer = [u64::MAX; 4];
        newer[0] = 24;
        // SAFETY: as long as it says.
        unsafe { Fill::new(newer.as_mut_ptr().cast::<Two>()) }.unwrap().set(value);
        assert_eq!(newer, [24, 2 << 32 | 1, 0, u64::MAX]);
    }

    #[test]
    fn buffers_that_are_too_small_are_told_what_is_needed() {
        let (mut buffer, mut len) = ([9u8; 4], 0);
        let at: *mut c_void = buffer.as_mut_ptr().cast();
        // SAFETY: as long as it is said to be.
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
