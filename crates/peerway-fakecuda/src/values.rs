//! Streams that wait for words in memory, or write them.

use std::ffi::c_uint;

use peerway_sys::cuda::ffi::*;

use crate::calls::{call_in_context, valid};
use crate::work::Work;

const EQ: c_uint = 1;
const AND: c_uint = 2;
const NOR: c_uint = 3;
/// Write without a barrier. Writes here always have one.
const NO_BARRIER: c_uint = 1;

/// Whether the condition of a wait holds.
pub(crate) fn reached(found: u64, value: u64, how: c_uint) -> bool {
    match how {
        // As a difference, so that counters may wrap around.
        CU_STREAM_WAIT_VALUE_GEQ => found.wrapping_sub(value).cast_signed() >= 0,
        EQ => found == value,
        AND => found & value != 0,
        _ => !(found | value) != 0,
    }
}

/// The flag for a flush of remote writes is refused, because the device's attribute says that it is
/// not supported.
///
/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamWaitValue64_v2(
    stream: CUstream,
    at: CUdeviceptr,
    value: u64,
    flags: c_uint,
) -> CUresult {
    call_in_context("cuStreamWaitValue64_v2", |machine, device| {
        valid(flags <= NOR && at.is_multiple_of(8))?;
        let work = Work::WaitValue { at, value, how: flags };
        machine.stream(device, stream)?.submit(work).map(drop)
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamWriteValue64_v2(
    stream: CUstream,
    at: CUdeviceptr,
    value: u64,
    flags: c_uint,
) -> CUresult {
    call_in_context("cuStreamWriteValue64_v2", |machine, device| {
        valid(flags <= NO_BARRIER && at.is_multiple_of(8))?;
        let work = Work::WriteValue { at, value };
        machine.stream(device, stream)?.submit(work).map(drop)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_compared_as_documented() {
        let geq = CU_STREAM_WAIT_VALUE_GEQ;
        assert!(reached(7, 7, geq) && reached(8, 7, geq) && !reached(6, 7, geq));
        assert!(reached(1, u64::MAX, geq) && !reached(u64::MAX, 1, geq));
        assert!(reached(5, 5, EQ) && !reached(6, 5, EQ));
        assert!(reached(6, 2, AND) && !reached(4, 2, AND));
        assert!(reached(0, 0, NOR) && !reached(u64::MAX, 0, NOR));
    }
}
