//! Buffers in host and GPU memory, with all pages touched. A buffer that would exhaust the
//! machine's free memory is refused, so that the kernel neither swaps nor kills a process.

use std::fmt;
use std::fs;
use std::str::FromStr;

use anyhow::{Context, anyhow, bail, ensure};
use peerway::gpu::{DeviceMemory, DeviceMemoryKind, DeviceMemoryOptions, GpuError, PinnedMemory};
use peerway::{Endpoint, Region};
use serde::{Deserialize, Serialize};

use super::size;

/// The memory of a side's buffer.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Memory {
    /// Host memory.
    #[default]
    Host,
    /// GPU memory, of the best kind that works.
    Gpu,
    /// GPU memory that is shared as a file descriptor.
    GpuFd,
    /// GPU memory from `cuMemAlloc`.
    GpuPlain,
    /// Pinned host memory, which GPUs access at full speed.
    Pinned,
}

impl Memory {
    /// The names in flags and rows.
    const NAMES: [(Self, &str); 5] = [
        (Self::Host, "host"),
        (Self::Gpu, "gpu"),
        (Self::GpuFd, "gpu-fd"),
        (Self::GpuPlain, "gpu-plain"),
        (Self::Pinned, "pinned"),
    ];

    /// Whether it is GPU memory.
    pub(crate) fn is_gpu(self) -> bool {
        matches!(self, Self::Gpu | Self::GpuFd | Self::GpuPlain)
    }

    /// Whether it needs a CUDA driver.
    pub(crate) fn needs_driver(self) -> bool {
        self != Self::Host
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::NAMES.iter().find(|(memory, _)| memory == self);
        f.pad(name.map_or("", |(_, name)| name))
    }
}

impl FromStr for Memory {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::NAMES.iter().find(|(_, name)| *name == text);
        found.map(|(memory, _)| *memory).ok_or_else(|| {
            let names: Vec<&str> = Self::NAMES.iter().map(|(_, name)| *name).collect();
            format!(
                "expected one of {} for both sides, or two separated by a comma",
                names.join(", ")
            )
        })
    }
}

/// The memory of a side, and its GPU number. The number has no meaning for host memory.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct Place {
    pub(crate) memory: Memory,
    pub(crate) gpu: u32,
}

impl Place {
    /// Returns an error with the reason if this process cannot allocate such memory.
    pub(crate) fn check(self) -> anyhow::Result<()> {
        if !self.memory.needs_driver() {
            return Ok(());
        }
        let count = peerway::gpu::devices().map_err(once)?.len();
        if !self.memory.is_gpu() {
            ensure!(count > 0, "pinned memory needs a GPU, but the driver shows none");
        } else if self.gpu as usize >= count {
            bail!("there is no GPU {}: the driver shows {count} GPUs", self.gpu);
        }
        Ok(())
    }

    /// Allocates memory of exactly the requested kind on the GPU. The GPUs in `peers` may access it
    /// too.
    pub(crate) fn on_gpu(self, len: u64, peers: &[u32]) -> anyhow::Result<DeviceMemory> {
        let from = match self.memory {
            Memory::GpuFd => DeviceMemoryKind::PosixFd,
            Memory::GpuPlain => DeviceMemoryKind::Plain,
            _ => DeviceMemoryKind::Fabric,
        };
        let options = DeviceMemoryOptions::default().from(from).peers(peers);
        let memory = DeviceMemory::allocate(self.gpu, len, &options).map_err(once)?;
        ensure!(
            self.memory != Memory::GpuFd || memory.kind() == from,
            "cannot allocate {from} memory on GPU {}: {}",
            self.gpu,
            memory.why_not_better().unwrap_or_default()
        );
        Ok(memory)
    }

    /// Allocates a region of such memory. Also returns a description of the memory if its kind was
    /// not fixed in advance. With `shared`, local peers can map host memory.
    pub(crate) fn region(
        self,
        endpoint: &Endpoint,
        len: u64,
        shared: bool,
    ) -> anyhow::Result<(Region, String)> {
        match self.memory {
            Memory::Host => Ok((region(endpoint, len, shared)?, String::new())),
            Memory::Pinned => {
                ensure_room(len)?;
                let memory = PinnedMemory::allocate(usize::try_from(len)?).map_err(once)?;
                Ok((endpoint.register(memory)?, "cuMemHostAlloc".to_owned()))
            }
            Memory::Gpu | Memory::GpuFd | Memory::GpuPlain => {
                let memory = self.on_gpu(len, &[])?;
                let why = memory.why_not_better().map(|why| format!(" ({why})"));
                let told =
                    format!("GPU {}, {}{}", self.gpu, memory.kind(), why.unwrap_or_default());
                let region = endpoint.register_gpu(memory)?;
                region.fill(0, len, 1)?;
                Ok((region, told))
            }
        }
    }
}

/// A run has up to three buffers of one size in this process, including the baseline's, and two in
/// the other process.
const SHARE: u64 = 5;

/// Allocates private memory and writes every page once.
pub(crate) fn touched(len: u64) -> anyhow::Result<Vec<u8>> {
    ensure_room(len)?;
    let len = usize::try_from(len)?;
    let mut memory = Vec::new();
    memory
        .try_reserve_exact(len)
        .with_context(|| format!("cannot allocate a buffer of {}", size::show(len as u64)))?;
    advise_huge(&mut memory);
    memory.resize(len, 1);
    Ok(memory)
}

/// Requests huge pages before the pages exist, as NumPy does for large arrays. Private memory then
/// resembles a user's memory. A kernel without huge pages ignores the request.
fn advise_huge(memory: &mut Vec<u8>) {
    const HUGE: usize = 2 << 20;
    let start = memory.as_mut_ptr() as usize;
    let (first, end) = (start.next_multiple_of(HUGE), (start + memory.capacity()) & !(HUGE - 1));
    if first < end {
        // SAFETY: the range lies inside the vector's allocation, which holds no values yet. The
        // advice changes only the size of its pages.
        let _ = unsafe {
            rustix::mm::madvise(first as *mut _, end - first, rustix::mm::Advice::LinuxHugepage)
        };
    }
}

/// Allocates a region and writes every page once. With `shared`, local peers can map it.
pub(crate) fn region(endpoint: &Endpoint, len: u64, shared: bool) -> anyhow::Result<Region> {
    if !shared {
        return Ok(endpoint.register(touched(len)?)?);
    }
    ensure_room(len)?;
    let region = endpoint.allocate(usize::try_from(len)?)?;
    region.fill(0, len, 1)?;
    Ok(region)
}

/// The error without its causes, because its message already includes them.
pub(crate) fn once(error: GpuError) -> anyhow::Error {
    anyhow!("{error}")
}

fn ensure_room(len: u64) -> anyhow::Result<()> {
    let free = fs::read_to_string("/proc/meminfo").ok().and_then(|text| available(&text));
    let fits = free.is_none_or(|free| len <= free / SHARE);
    ensure!(
        fits,
        "a buffer of {} exceeds 1/{SHARE} of the free memory: choose smaller --sizes",
        size::show(len)
    );
    Ok(())
}

/// Bytes that can be allocated without swapping, according to the kernel.
fn available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_is_understood() {
        let text = "MemTotal:       24000 kB\nMemAvailable:   12000 kB\n";
        assert_eq!(available(text), Some(12_000 << 10));
        assert_eq!(available("MemTotal: 1 kB"), None);
    }

    #[test]
    fn names_read_back_as_programs_see_them() {
        for (memory, name) in Memory::NAMES {
            assert_eq!(name.parse(), Ok(memory));
            assert_eq!(memory.to_string(), name);
            assert_eq!(serde_json::to_value(memory).unwrap(), name);
        }
        assert!("vram".parse::<Memory>().unwrap_err().contains("gpu-plain"));
    }

    #[test]
    fn host_memory_asks_no_driver() {
        assert!(Place { memory: Memory::Host, gpu: 99 }.check().is_ok());
        let error = Place { memory: Memory::Gpu, gpu: 99 }.check().unwrap_err().to_string();
        assert!(error.contains("GPU"), "{error}");
    }

    #[test]
    fn absurd_sizes_are_refused() {
        let error = touched(1 << 60).unwrap_err();
        assert!(error.to_string().contains("1048576T"), "{error}");
    }
}
