//! A window in bytes and frames: how much unacknowledged data a lane may have.

/// The unacknowledged bytes and frames of a lane, and their limits.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    bytes: u64,
    frames: u32,
    max_bytes: u64,
    max_frames: u32,
}

impl Window {
    /// An empty window.
    pub fn new(max_bytes: u64, max_frames: u32) -> Self {
        Self { bytes: 0, frames: 0, max_bytes, max_frames }
    }

    /// The number of bytes that one more frame may carry. 0 means that the sender must wait. An
    /// idle window accepts a frame of any size, so progress does not depend on the configured
    /// limit.
    #[inline]
    pub fn room(&self) -> u64 {
        if self.frames >= self.max_frames {
            0
        } else if self.bytes == 0 {
            u64::MAX
        } else {
            self.max_bytes.saturating_sub(self.bytes)
        }
    }

    /// Accounts for a frame that was sent.
    #[inline]
    pub fn take(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_add(bytes);
        self.frames += 1;
    }

    /// Accounts for a frame that was acknowledged.
    #[inline]
    pub fn put_back(&mut self, bytes: u64) {
        debug_assert!(self.frames > 0 && self.bytes >= bytes);
        self.bytes = self.bytes.saturating_sub(bytes);
        self.frames = self.frames.saturating_sub(1);
    }

    /// Whether no frame is unacknowledged.
    pub fn is_idle(&self) -> bool {
        self.frames == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_bytes_and_frames() {
        let mut window = Window::new(100, 3);
        window.take(500);
        assert_eq!(window.room(), 0);
        window.put_back(500);
        window.take(10);
        assert_eq!(window.room(), 90);
        window.take(10);
        window.take(10);
        assert_eq!(window.room(), 0, "frames are bounded too");
        window.put_back(10);
        assert_eq!(window.room(), 80);
    }
}
