//! Sequential readers and writers of fields.

/// A decoding error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The bytes end within a field.
    #[error("too short: {field} ends at byte {needed}, there are {got}")]
    TooShort { field: &'static str, needed: usize, got: usize },
    /// There are more bytes than the message has.
    #[error("{excess} bytes too many")]
    TooLong { excess: usize },
    /// The message is of another version of the protocol.
    #[error("version {0}, not {version}", version = super::VERSION)]
    Version(u8),
    /// No message has this kind.
    #[error("no message of kind {0}")]
    Kind(u16),
    /// A datagram of another protocol.
    #[error("a management datagram of another protocol: {field} is {value:#x}")]
    Foreign { field: &'static str, value: u32 },
    /// A field has an invalid value.
    #[error("{field} is {value:#x}: {expected}")]
    Field { field: &'static str, value: u64, expected: &'static str },
}

/// An encoding error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// The buffer is too small.
    #[error("{needed} bytes do not fit in {available}")]
    BufferTooSmall { needed: usize, available: usize },
    /// The message would be longer than the protocol allows.
    #[error("the message has {0} bytes, more than a message may have")]
    TooLong(usize),
}

/// Consumes fields from the front of a slice.
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader { bytes, at: 0 }
    }

    fn take(&mut self, field: &'static str, len: usize) -> Result<&'a [u8], DecodeError> {
        let needed = self.at.saturating_add(len);
        let taken = self.bytes.get(self.at..needed).ok_or(DecodeError::TooShort {
            field,
            needed,
            got: self.bytes.len(),
        })?;
        self.at = needed;
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], DecodeError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(field, N)?);
        Ok(array)
    }

    pub(super) fn u8(&mut self, field: &'static str) -> Result<u8, DecodeError> {
        self.array(field).map(u8::from_le_bytes)
    }

    pub(super) fn u16(&mut self, field: &'static str) -> Result<u16, DecodeError> {
        self.array(field).map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self, field: &'static str) -> Result<u32, DecodeError> {
        self.array(field).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, field: &'static str) -> Result<u64, DecodeError> {
        self.array(field).map(u64::from_le_bytes)
    }

    /// Successive 64-bit numbers.
    pub(super) fn words(
        &mut self,
        field: &'static str,
        count: usize,
    ) -> Result<impl Iterator<Item = u64> + use<'a>, DecodeError> {
        let bytes = self.take(field, count * size_of::<u64>())?;
        Ok(bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)))
    }

    /// A 24-bit number in 32 bits: a queue pair number or a PSN.
    pub(super) fn u24(&mut self, field: &'static str) -> Result<u32, DecodeError> {
        let value = self.u32(field)?;
        if value >> 24 == 0 { Ok(value) } else { refuse(field, value.into(), "a number of 24 bits") }
    }

    /// Reserved bytes.
    pub(super) fn zeros(&mut self, field: &'static str, len: usize) -> Result<(), DecodeError> {
        match self.take(field, len)?.iter().find(|&&byte| byte != 0) {
            None => Ok(()),
            Some(&byte) => refuse(field, byte.into(), "reserved, must be zero"),
        }
    }

    /// The remaining bytes.
    pub(super) fn rest(&mut self) -> &'a [u8] {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        self.at = self.bytes.len();
        rest
    }

    pub(super) fn is_empty(&self) -> bool {
        self.at == self.bytes.len()
    }

    pub(super) fn end(self) -> Result<(), DecodeError> {
        match self.bytes.len() - self.at {
            0 => Ok(()),
            excess => Err(DecodeError::TooLong { excess }),
        }
    }
}

/// A field's value is invalid.
pub(super) fn refuse<T>(field: &'static str, value: u64, expected: &'static str) -> Result<T, DecodeError> {
    Err(DecodeError::Field { field, value, expected })
}

/// Checks that a range of addresses does not exceed the address space.
pub(super) fn check_range(field: &'static str, va: u64, len: u64) -> Result<(), DecodeError> {
    match va.checked_add(len.saturating_sub(1)) {
        Some(_) => Ok(()),
        None => refuse(field, va, "the range ends beyond the address space"),
    }
}

/// Appends fields. Counts bytes beyond the end of the buffer, too, so that the error can state the needed length.
pub(super) struct Writer<'a> {
    out: &'a mut [u8],
    at: usize,
}

impl<'a> Writer<'a> {
    pub(super) fn new(out: &'a mut [u8]) -> Writer<'a> {
        Writer { out, at: 0 }
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        if let Some(dest) = self.out.get_mut(self.at..self.at + bytes.len()) {
            dest.copy_from_slice(bytes);
        }
        self.at += bytes.len();
        self
    }

    pub(super) fn zeros(&mut self, len: usize) -> &mut Self {
        for _ in 0..len {
            self.bytes(&[0]);
        }
        self
    }

    pub(super) fn u8(&mut self, value: u8) -> &mut Self {
        self.bytes(&[value])
    }

    pub(super) fn u16(&mut self, value: u16) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub(super) fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub(super) fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    /// The number of bytes, if all of them fit.
    pub(super) fn finish(&self) -> Result<usize, EncodeError> {
        if self.at <= self.out.len() {
            Ok(self.at)
        } else {
            Err(EncodeError::BufferTooSmall { needed: self.at, available: self.out.len() })
        }
    }
}
