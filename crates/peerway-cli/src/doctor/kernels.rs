//! Kernels that are compiled at run time: their compiler, and the cache directory.

use peerway::gpu::jit::Status;
use serde_json::json;

use super::report::{Row, bytes};

/// The row about kernels.
pub(super) fn row(status: &Status) -> Row {
    let kept = match (&status.directory, &status.problem) {
        (_, Some(problem)) => format!("not cached: {problem}"),
        (None, None) => "not cached: PEERWAY_KERNEL_CACHE is off".to_owned(),
        (Some(directory), None) => {
            format!("{} cached in {}, {}", status.images, directory.display(), bytes(status.bytes))
        }
    };
    let (compiler, error) = match &status.compiler {
        Ok(compiler) => (Some(compiler), None),
        Err(error) => (None, Some(error)),
    };
    let value = match compiler {
        Some(compiler) => format!("compiled by {compiler}"),
        None => "no compiler works".to_owned(),
    };
    let row = match (compiler, &status.problem) {
        (Some(_), None) => Row::ok("kernels", value),
        (None, None) => Row::absent("kernels", value),
        (_, Some(_)) => Row::attention("kernels", value),
    };
    row.note(kept).data(json!({
        "compiler": compiler,
        "error": error,
        "directory": status.directory,
        "images": status.images,
        "bytes": status.bytes,
        "problem": status.problem,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::report::Section;

    fn shown(status: &Status) -> String {
        let mut section = Section::new("gpus", "GPUs");
        section.push(row(status));
        section.to_string()
    }

    #[test]
    fn compiler_and_directory_are_told() {
        let mut status = peerway::gpu::jit::status();
        status.compiler = Ok("NVRTC 12.9".to_owned());
        status.directory = Some("/some/where".into());
        (status.images, status.bytes, status.problem) = (3, 4096, None);
        let text = shown(&status);
        assert!(text.contains("NVRTC 12.9") && text.contains("3 cached in /some/where"), "{text}");
        status.compiler = Err("not found".to_owned());
        assert!(shown(&status).contains("no compiler works"), "{status:?}");
        status.problem = Some("owned by another user".to_owned());
        assert!(shown(&status).contains("not cached: owned by another user"), "{status:?}");
        (status.problem, status.directory) = (None, None);
        assert!(shown(&status).contains("PEERWAY_KERNEL_CACHE is off"), "{status:?}");
    }
}
