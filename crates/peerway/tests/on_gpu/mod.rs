//! What tests on a CUDA driver share.

/// Whether there is a GPU; says so where there is none. `RUST_LOG=peerway=debug` shows what the engine does.
pub(crate) fn has_gpu() -> bool {
    let _ = tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_test_writer()
        .try_init();
    match peerway::gpu::devices() {
        Ok(devices) if !devices.is_empty() => true,
        Ok(_) => {
            eprintln!("skipped: the driver sees no GPU");
            false
        }
        Err(error) => {
            eprintln!("skipped: {error}");
            false
        }
    }
}
