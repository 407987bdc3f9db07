//! What tests on a CUDA driver share.

/// Fails where there is no GPU. `RUST_LOG=peerway=debug` shows what the engine does.
pub(crate) fn require_gpu() {
    let _ = tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_test_writer()
        .try_init();
    let devices = peerway::gpu::devices().expect("this test needs a CUDA driver");
    assert!(!devices.is_empty(), "this test needs a GPU, and the driver sees none");
}
