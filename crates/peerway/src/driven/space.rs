//! Windows: registered memory that commands name by offset.
//!
//! The windows of one side follow one another in one space of offsets. A gap separates them, so
//! that a range that runs over the end of a window lies in no window.

use peerway_core::command::MAX_SPACE;

/// Every window starts at a multiple of this.
const ALIGN: u64 = 64 << 10;

/// The place of a window in the space of offsets of its side.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, serde::Deserialize, serde::Serialize)]
pub struct Window {
    /// The offset of the first byte. A kernel adds it to an offset inside the window.
    pub base: u64,
    /// Bytes.
    pub len: u64,
}

/// Windows in ascending order of base, each with its payload.
#[derive(Clone, Debug)]
pub(crate) struct Space<T> {
    entries: Vec<(Window, T)>,
}

impl<T> Default for Space<T> {
    fn default() -> Self {
        Self { entries: Vec::new() }
    }
}

impl<T> Space<T> {
    /// The window that a new one of `len` bytes would get. `None` if the space has no room.
    pub(crate) fn next(&self, len: u64) -> Option<Window> {
        let end = self.entries.last().map_or(0, |(last, _)| last.base + last.len + ALIGN);
        let base = end.next_multiple_of(ALIGN);
        (base.checked_add(len)? <= MAX_SPACE).then_some(Window { base, len })
    }

    /// Adds a window behind all others. Returns false if it is not behind them or not inside the
    /// space.
    pub(crate) fn push(&mut self, window: Window, what: T) -> bool {
        let after = self.entries.last().map_or(0, |(last, _)| last.base + last.len);
        let fits = window.base.checked_add(window.len).is_some_and(|end| end <= MAX_SPACE);
        if window.base < after || !fits {
            return false;
        }
        self.entries.push((window, what));
        true
    }

    /// Finds the window that contains a range: its number, and the range's offset in it.
    #[inline]
    pub(crate) fn find(&self, offset: u64, len: u64) -> Option<(usize, u64)> {
        // Most sides have one or two windows, and most commands name the first, so a linear search
        // is fast.
        let found = |(window, _): &(Window, T)| {
            offset
                .checked_sub(window.base)
                .filter(|inside| *inside <= window.len && len <= window.len - inside)
        };
        let mut entries = self.entries.iter().enumerate();
        entries.find_map(|(at, entry)| found(entry).map(|inside| (at, inside)))
    }

    #[inline]
    pub(crate) fn get(&self, at: usize) -> &T {
        &self.entries[at].1
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn windows(&self) -> Vec<Window> {
        self.entries.iter().map(|(window, _)| *window).collect()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &(Window, T)> {
        self.entries.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_found_in_one_window_and_never_across() {
        let mut space = Space::default();
        for len in [100, ALIGN, 8] {
            let window = space.next(len).unwrap();
            assert!(space.push(window, len));
        }
        let windows = space.windows();
        assert_eq!(space.find(0, 100), Some((0, 0)));
        assert_eq!(space.find(96, 8), None);
        assert_eq!(space.find(windows[1].base + 4, ALIGN - 4), Some((1, 4)));
        assert_eq!(space.find(windows[1].base + 4, ALIGN), None);
        assert_eq!(space.find(windows[2].base, u64::MAX), None);
        assert_eq!(space.find(u64::MAX, 1), None);
        assert_eq!(*space.get(2), 8);
    }

    #[test]
    fn windows_that_overlap_or_leave_the_space_are_refused() {
        let mut space = Space::default();
        assert!(space.push(Window { base: 4096, len: 4096 }, ()));
        assert!(!space.push(Window { base: 8000, len: 1 }, ()));
        assert!(!space.push(Window { base: u64::MAX, len: 2 }, ()));
        assert!(!space.push(Window { base: MAX_SPACE - 1, len: 2 }, ()));
        assert_eq!(space.next(MAX_SPACE), None);
    }
}
