//! The bytes of a fuzz input, read as choices. An input that is used up yields zeros.

pub(super) struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn byte(&mut self) -> u8 {
        self.0.split_off_first().copied().unwrap_or(0)
    }

    /// A number below `bound`, which is not 0.
    pub(super) fn below(&mut self, bound: usize) -> usize {
        let wide = if bound > 256 { usize::from(self.byte()) << 8 } else { 0 };
        (wide | usize::from(self.byte())) % bound
    }

    /// Any number. Most are at the edges, where arithmetic goes wrong.
    pub(super) fn number(&mut self) -> u64 {
        let near = u64::from(self.byte());
        match self.byte() % 6 {
            0 => near,
            1 => u64::MAX - near,
            2 => u64::from(u32::MAX) - near,
            3 => (1 << 63) + near,
            4 => 0x0101_0101_0101_0101 * near,
            _ => near << (self.byte() % 64),
        }
    }

    pub(super) fn bytes(&mut self, most: usize) -> &'a [u8] {
        self.0.split_off(..most.min(self.0.len())).unwrap_or_default()
    }
}
