//! Bytes as hexadecimal text, for control lines.

use anyhow::{Result, ensure};

/// Encodes each byte as two digits. An empty slice becomes `-`, so that a word is never empty.
pub fn encode(bytes: &[u8]) -> String {
    if bytes.is_empty() {
        return "-".to_owned();
    }
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// The inverse of [`encode`].
pub fn decode(text: &str) -> Result<Vec<u8>> {
    if text == "-" {
        return Ok(Vec::new());
    }
    ensure!(
        text.len().is_multiple_of(2) && text.is_ascii(),
        "hex text has an odd length or is not ASCII"
    );
    (0..text.len() / 2).map(|i| Ok(u8::from_str_radix(&text[2 * i..2 * i + 2], 16)?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip() {
        for bytes in [&b""[..], b"\x00\xffa"] {
            assert_eq!(decode(&encode(bytes)).unwrap(), bytes);
        }
        assert!(decode("abc").is_err() && decode("zz").is_err());
    }
}
