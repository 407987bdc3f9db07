//! Copies that bypass the lanes: by threads of this process, by CMA, and by GPUs.

pub(crate) mod direct;
pub(crate) mod gpu;
pub(crate) mod pool;
pub(crate) mod pull;
pub(crate) mod stores;
