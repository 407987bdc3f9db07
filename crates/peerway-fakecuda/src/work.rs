//! The work of a stream's thread, one piece at a time.
//!
//! Addresses are looked up when the work is executed, not when it is submitted. Memory that is
//! unmapped in between is therefore an illegal address. The thread holds no lock while it copies or
//! waits.

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use peerway_sys::cuda::ffi::*;

use crate::calls::{Answer, in_callback};
use crate::copies::write_host;
use crate::device::Device;
use crate::event::Event;
use crate::kernel::Kernel;
use crate::lock;
use crate::machine::Machine;
use crate::space::{Access, Span};
use crate::stream::rest;
use crate::values::reached;
use peerway_fakescript::Dice;

/// Interval at which a waiting stream reads its word.
const POLL: Duration = Duration::from_micros(20);

#[derive(Clone, Debug)]
pub(crate) enum Work {
    Copy {
        to: Target,
        from: Source,
        len: u64,
    },
    Fill {
        at: u64,
        value: u8,
        len: u64,
    },
    Launch(Arc<Kernel>),
    /// A function of the program, and its argument.
    Call(CUhostFn, usize),
    WaitValue {
        at: u64,
        value: u64,
        how: u32,
    },
    WriteValue {
        at: u64,
        value: u64,
    },
    /// An event, and the number of the recording.
    Record(Arc<Event>, u64),
    Await(Arc<Event>, u64),
}

/// The source of a copy.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    /// Memory that a GPU can access.
    Gpu(u64),
    /// The bytes that pageable memory held at the call.
    Bytes(Arc<[u8]>),
}

/// The target of a copy.
#[derive(Clone, Debug)]
pub(crate) enum Target {
    Gpu(u64),
    /// Pageable memory of a caller that waits, and the error to report if it is not mapped.
    Pageable(usize, Arc<AtomicI32>),
}

impl Work {
    /// Executes the work.
    ///
    /// # Errors
    ///
    /// The error that the context fails with.
    pub(crate) fn perform(&self, machine: &Machine, device: &Device, dice: &mut Dice) -> Answer {
        let engine = Engine { machine, device };
        match self {
            Self::Record(event, number) => event.reach(*number),
            Self::Await(event, number) => event.wait(*number),
            // No work is executed in a failed context.
            _ if device.failed().is_err() => {}
            Self::Copy { to, from, len } => return engine.copy_any(to, from, *len),
            Self::Fill { at, value, len } => return engine.fill(*at, *value, *len),
            Self::Launch(kernel) => return kernel.perform(&engine, dice),
            Self::Call(function, data) => {
                let data = ptr::with_exposed_provenance_mut(*data);
                // SAFETY: the program promised `cuLaunchHostFunc` that function and argument are
                // valid.
                in_callback(|| unsafe { function(data) });
            }
            Self::WaitValue { at, value, how } => return engine.wait_value(*at, *value, *how),
            Self::WriteValue { at, value } => return engine.write_value(*at, *value),
        }
        Ok(())
    }
}

/// A device that executes work.
pub(crate) struct Engine<'a> {
    machine: &'a Machine,
    device: &'a Device,
}

impl Engine<'_> {
    fn spans(&self, at: u64, len: u64, write: bool, copy: bool) -> Result<Vec<Span>, CUresult> {
        let access = Access { device: self.device.index, write, copy };
        lock(&self.machine.space).resolve(access, at, len)
    }

    fn copy_any(&self, to: &Target, from: &Source, len: u64) -> Answer {
        self.pace(len);
        let held = match from {
            Source::Gpu(at) => self.spans(*at, len, false, true)?,
            Source::Bytes(_) => Vec::new(),
        };
        let sources: Vec<Bytes> = match from {
            Source::Gpu(_) => pieces(&held),
            Source::Bytes(bytes) => vec![(bytes.as_ptr().cast_mut(), bytes.len())],
        };
        match to {
            Target::Gpu(at) => copy(&pieces(&self.spans(*at, len, true, true)?), &sources),
            Target::Pageable(address, answer) => {
                let mut at = *address;
                for (start, count) in sources {
                    if !write_host(at, start, count) {
                        // The caller reads it after the stream has finished this work, which orders
                        // the two accesses.
                        answer.store(CUDA_ERROR_INVALID_VALUE, Ordering::Relaxed);
                        break;
                    }
                    at += count;
                }
            }
        }
        Ok(())
    }

    fn fill(&self, at: u64, value: u8, len: u64) -> Answer {
        for span in self.spans(at, len, true, true)? {
            // SAFETY: by the span contract.
            unsafe { span.start.write_bytes(value, span.len) };
        }
        Ok(())
    }

    /// Copies as a kernel does.
    pub(crate) fn copy(&self, to: u64, from: u64, len: u64) -> Answer {
        let sources = self.spans(from, len, false, false)?;
        let targets = self.spans(to, len, true, false)?;
        copy(&pieces(&targets), &pieces(&sources));
        Ok(())
    }

    /// The bytes of a range, as a kernel reads its arguments.
    pub(crate) fn read(&self, at: u64, len: u64) -> Result<Vec<u8>, CUresult> {
        let sources = self.spans(at, len, false, false)?;
        let mut bytes = vec![0; len as usize];
        copy(&[(bytes.as_mut_ptr(), bytes.len())], &pieces(&sources));
        Ok(bytes)
    }

    /// Stores a flag after everything that was copied before.
    pub(crate) fn store(&self, at: u64, value: u32) -> Answer {
        let spans = self.spans(at, 4, true, false)?;
        let place = aligned::<u32>(&spans)?;
        // SAFETY: by the span contract, and `aligned` checked the alignment. Pairs with the load of
        // the thread that waits for the flag.
        unsafe { AtomicU32::from_ptr(place) }.store(value, Ordering::Release);
        Ok(())
    }

    /// Sleeps for the time that a copy of `len` bytes takes.
    pub(crate) fn pace(&self, len: u64) {
        if let Some(rate) = self.machine.script.gbps {
            rest(Duration::from_nanos(len / rate));
        }
    }

    /// Whether the context has failed. A waiting kernel must then stop, because it would wait for
    /// ever.
    pub(crate) fn failed(&self) -> bool {
        self.device.failed().is_err()
    }

    /// Loads a word that other threads write.
    pub(crate) fn load(&self, at: u64) -> Result<u64, CUresult> {
        let mut value = 0;
        // Pairs with the store of the thread that writes the word.
        self.with_words(at, 1, |words| value = words[0].load(Ordering::Acquire))?;
        Ok(value)
    }

    /// Gives access to words that other threads write.
    pub(crate) fn with_words(
        &self,
        at: u64,
        count: u64,
        look: impl FnOnce(&[AtomicU64]),
    ) -> Answer {
        let spans = self.spans(at, count * 8, false, false)?;
        let place = aligned::<AtomicU64>(&spans)?;
        if spans.len() != 1 {
            return Err(CUDA_ERROR_ILLEGAL_ADDRESS);
        }
        // SAFETY: by the span contract, and `aligned` checked the alignment. All threads access
        // these words as atomics.
        look(unsafe { std::slice::from_raw_parts(place, count as usize) });
        Ok(())
    }

    pub(crate) fn write_value(&self, at: u64, value: u64) -> Answer {
        let spans = self.spans(at, 8, true, false)?;
        let place = aligned::<u64>(&spans)?;
        // SAFETY: by the span contract, and `aligned` checked the alignment. Pairs with the load of
        // the thread that waits for the value.
        unsafe { AtomicU64::from_ptr(place) }.store(value, Ordering::Release);
        Ok(())
    }

    /// Polls a word until it meets the condition, or until the context fails.
    fn wait_value(&self, at: u64, value: u64, how: u32) -> Answer {
        while self.device.failed().is_ok() {
            let spans = self.spans(at, 8, false, false)?;
            let place = aligned::<u64>(&spans)?;
            // SAFETY: by the span contract, and `aligned` checked the alignment. Pairs with the
            // store of the thread that writes the word.
            let found = unsafe { AtomicU64::from_ptr(place) }.load(Ordering::Acquire);
            drop(spans);
            if reached(found, value, how) {
                break;
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }
}

/// The address of a word, if it is in one piece and aligned.
fn aligned<T>(spans: &[Span]) -> Result<*mut T, CUresult> {
    let place = spans.first().filter(|span| span.len >= size_of::<T>());
    let place = place.map(|span| span.start.cast::<T>()).filter(|place| place.is_aligned());
    place.ok_or(CUDA_ERROR_ILLEGAL_ADDRESS)
}

/// A start and a length.
type Bytes = (*mut u8, usize);

fn pieces(spans: &[Span]) -> Vec<Bytes> {
    spans.iter().map(|span| (span.start, span.len)).collect()
}

/// Copies the bytes of some pieces to others of the same total length. Overlap within a piece is
/// copied correctly, but CUDA does not guarantee that.
fn copy(to: &[Bytes], from: &[Bytes]) {
    let (mut targets, mut sources) = (to.iter().copied(), from.iter().copied());
    let (mut target, mut source) = (targets.next(), sources.next());
    while let (Some((into, room)), Some((start, left))) = (target, source) {
        let count = room.min(left);
        // SAFETY: by the span contract, or the pieces are bytes that the caller owns.
        unsafe { ptr::copy(start, into, count) };
        target = advance((into, room), count).or_else(|| targets.next());
        source = advance((start, left), count).or_else(|| sources.next());
    }
}

fn advance((start, len): Bytes, count: usize) -> Option<Bytes> {
    (count < len).then(|| (start.wrapping_add(count), len - count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_need_not_meet() {
        let mut from: Vec<u8> = (0..100).collect();
        let mut to = vec![0u8; 100];
        let cut = |bytes: &mut Vec<u8>, at: &[usize]| -> Vec<Bytes> {
            let start = bytes.as_mut_ptr();
            at.windows(2).map(|two| (start.wrapping_add(two[0]), two[1] - two[0])).collect()
        };
        let targets = cut(&mut to, &[0, 1, 50, 99, 100]);
        let sources = cut(&mut from, &[0, 30, 31, 50, 100]);
        copy(&targets, &sources);
        assert_eq!(to, from);
    }
}
