//! A byte and frame window: how much a lane may have unacknowledged.

/// What is on the way and what may be.
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

    /// How many bytes one more frame may carry; 0 means wait. An idle window takes a frame of any
    /// allowed size, so that progress never depends on how the limit was set.
    pub fn room(&self) -> u64 {
        if self.frames >= self.max_frames {
            0
        } else if self.bytes == 0 {
            u64::MAX
        } else {
            self.max_bytes.saturating_sub(self.bytes)
        }
    }

    /// A frame went out.
    pub fn take(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_add(bytes);
        self.frames += 1;
    }

    /// A frame was answered.
    pub fn put_back(&mut self, bytes: u64) {
        debug_assert!(self.frames > 0 && self.bytes >= bytes);
        self.bytes = self.bytes.saturating_sub(bytes);
        self.frames = self.frames.saturating_sub(1);
    }

    /// Whether nothing is on the way.
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
