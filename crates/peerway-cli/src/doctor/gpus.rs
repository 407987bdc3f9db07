//! GPUs as the CUDA driver reports them, and a trial allocation of shareable memory on each.

use std::path::Path;

use peerway::gpu::{DeviceMemory, DeviceMemoryOptions, Facts, GpuError};
use peerway_sys::cuda::NoCuda;
use serde_json::json;

use super::report::{Row, Section, bytes};
use super::{kernels, topology};

/// Bytes of the trial allocation: the allocation granularity of GPUs.
const TRIED: u64 = 2 << 20;

/// The section about GPUs: facts from the kernel, then facts from the CUDA driver if there is one.
pub(super) fn section(root: &Path) -> Section {
    let mut section = topology::gpu_section(root);
    for row in rows(peerway::gpu::devices(), attempt) {
        section.push(row);
    }
    section.push(kernels::row(&peerway::gpu::jit::status()));
    section
}

/// The rows from the CUDA driver. Without a driver there are none: the section about libraries
/// gives the reason.
fn rows(
    devices: Result<Vec<Facts>, GpuError>,
    attempt: impl Fn(u32) -> Result<Made, GpuError>,
) -> Vec<Row> {
    let devices = match devices {
        Ok(devices) => devices,
        Err(GpuError::NoDriver(NoCuda::Library(_))) => return Vec::new(),
        Err(error) => return vec![Row::attention("CUDA", "not usable").note(error.to_string())],
    };
    if devices.is_empty() {
        let row = Row::absent("CUDA", "the driver shows no GPU");
        return vec![row.note("CUDA_VISIBLE_DEVICES selects the GPUs that the driver shows")];
    }
    let each = devices.iter().zip(0..).flat_map(|(facts, index)| {
        let name = format!("CUDA GPU {index}");
        [about(&name, facts), can(&name, facts), memory(&name, attempt(index))]
    });
    each.collect()
}

fn about(name: &str, facts: &Facts) -> Row {
    let (major, minor) = facts.capability;
    let numa = facts.numa.map(|node| format!(", NUMA node {node}")).unwrap_or_default();
    let note = format!(
        "{}, {}, compute capability {major}.{minor}, {} multiprocessors{numa}, {}",
        facts.bus_id,
        bytes(facts.memory),
        facts.multiprocessors,
        uuid(&facts.uuid)
    );
    Row::ok(name, &facts.name).note(note).data(json!({
        "name": facts.name,
        "uuid": uuid(&facts.uuid),
        "bus_id": facts.bus_id,
        "memory": facts.memory,
        "capability": format!("{major}.{minor}"),
        "multiprocessors": facts.multiprocessors,
        "numa_node": facts.numa,
    }))
}

/// The capabilities that the driver reports for the GPU.
fn can(name: &str, facts: &Facts) -> Row {
    let all = [
        ("virtual memory management", facts.vmm),
        ("file descriptors", facts.posix_fd),
        ("fabric handles", facts.fabric),
        ("RDMA", facts.rdma),
        ("RDMA with virtual memory management", facts.rdma_vmm),
        ("ordered RDMA writes", facts.rdma_ordered),
        ("dma-buf", facts.dma_buf),
    ];
    let list = |wanted: bool| {
        let some = all.iter().filter(|(_, there)| *there == wanted);
        some.map(|(what, _)| *what).collect::<Vec<_>>().join(", ")
    };
    let (there, missing) = (list(true), list(false));
    let name = format!("{name} capabilities");
    let row = if there.is_empty() { Row::absent(name, "none") } else { Row::ok(name, there) };
    let row = if missing.is_empty() { row } else { row.note(format!("missing: {missing}")) };
    row.data(json!({
        "vmm": facts.vmm,
        "posix_fd": facts.posix_fd,
        "fabric": facts.fabric,
        "rdma": facts.rdma,
        "rdma_vmm": facts.rdma_vmm,
        "rdma_ordered": facts.rdma_ordered,
        "dma_buf": facts.dma_buf,
    }))
}

/// The result of a trial allocation.
struct Made {
    kind: String,
    why_not_better: Option<String>,
}

/// Allocates a little memory of the best kind that works, and frees it at once.
fn attempt(gpu: u32) -> Result<Made, GpuError> {
    let memory = DeviceMemory::allocate(gpu, TRIED, &DeviceMemoryOptions::default())?;
    Ok(Made { kind: memory.kind().to_string(), why_not_better: memory.why_not_better() })
}

fn memory(name: &str, tried: Result<Made, GpuError>) -> Row {
    let name = format!("{name} memory (tried)");
    match tried {
        Ok(Made { kind, why_not_better }) => {
            let data = json!({ "kind": kind, "why_not_better": why_not_better });
            let row = Row::ok(name, kind).data(data);
            match why_not_better {
                Some(why) => row.note(why),
                None => row,
            }
        }
        Err(error) => {
            let error = error.to_string();
            Row::attention(name, "none").data(json!({ "error": error })).note(error)
        }
    }
}

/// The UUID in the format of `nvidia-smi`.
fn uuid(bytes: &[u8; 16]) -> String {
    let mut text = "GPU".to_owned();
    for (i, byte) in bytes.iter().enumerate() {
        if matches!(i, 0 | 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(rows: Vec<Row>) -> String {
        let mut section = Section::new("gpus", "GPUs");
        rows.into_iter().for_each(|row| section.push(row));
        section.to_string()
    }

    #[test]
    fn a_uuid_is_written_as_people_know_it() {
        let bytes: [u8; 16] = std::array::from_fn(|i| i as u8 * 0x11);
        assert_eq!(uuid(&bytes), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }

    #[test]
    fn what_an_attempt_gave_is_told_with_the_reason() {
        let why = Some("fabric: not permitted".to_owned());
        let made = Ok(Made { kind: "posix-fd".to_owned(), why_not_better: why });
        let text = shown(vec![memory("CUDA GPU 0", made)]);
        assert!(text.contains("posix-fd") && text.contains("not permitted"), "{text}");
        let refused = Err(GpuError::NoSuchGpu { index: 7, count: 1, variable: "that decides" });
        let text = shown(vec![memory("CUDA GPU 7", refused)]);
        assert!(text.contains("!") && text.contains("there is no GPU 7"), "{text}");
    }

    #[test]
    fn a_driver_without_gpus_says_so() {
        let text = shown(rows(Ok(Vec::new()), attempt));
        assert!(text.contains("shows no GPU") && text.contains("CUDA_VISIBLE_DEVICES"), "{text}");
    }

    /// Runs with any driver: a GPU's, a stand-in, or none.
    #[test]
    fn every_gpu_has_its_rows() {
        let devices = peerway::gpu::devices();
        let count = match &devices {
            Ok(devices) if devices.is_empty() => 1,
            Ok(devices) => 3 * devices.len(),
            Err(GpuError::NoDriver(NoCuda::Library(_))) => 0,
            Err(_) => 1,
        };
        assert_eq!(rows(devices, attempt).len(), count);
    }
}
