//! Helpers of the tests that need a CUDA driver.

/// Fails without a GPU. `RUST_LOG=peerway=debug` shows the log of the engine.
pub(crate) fn require_gpu() {
    let _ = tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_test_writer()
        .try_init();
    let devices = peerway::gpu::devices().expect("this test needs a CUDA driver");
    assert!(!devices.is_empty(), "this test needs a GPU, but the driver reports none");
}
