//! Fields of messages: bytes to values and back.

/// Why bytes are no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The bytes end within a field.
    #[error("too short: {needed} bytes are needed at {at}, there are {got}")]
    TooShort {
        /// Where the field begins.
        at: usize,
        /// Its length in bytes.
        needed: usize,
        /// The bytes that are left.
        got: usize,
    },
    /// There are bytes behind the message, or it is longer than a message may be.
    #[error("{0} bytes too many")]
    TooLong(usize),
    /// Another version of the protocol.
    #[error("version {0}, not {version}", version = super::VERSION)]
    Version(u8),
    /// No message has this kind.
    #[error("no message of kind {0}")]
    Kind(u8),
    /// A field has an invalid value.
    #[error("a {field} is {value:#x}")]
    Field {
        /// What it is.
        field: &'static str,
        /// Its value.
        value: u64,
    },
}

/// Consumes fields from the front of a message.
#[derive(Debug)]
pub struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    /// Begins at the first byte.
    pub fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader { bytes, at: 0 }
    }

    /// The next bytes.
    pub fn take(&mut self, len: usize) -> Result<&'a [u8], DecodeError> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let taken =
            rest.get(..len).ok_or(DecodeError::TooShort { at: self.at, needed: len, got: rest.len() })?;
        self.at += len;
        Ok(taken)
    }

    /// Reserved bytes, which are zero.
    pub fn zeros(&mut self, len: usize) -> Result<(), DecodeError> {
        match self.take(len)?.iter().find(|&&byte| byte != 0) {
            None => Ok(()),
            Some(&byte) => refuse("reserved byte", byte.into()),
        }
    }

    /// Checks that nothing is left.
    pub fn end(self) -> Result<(), DecodeError> {
        match self.bytes.len() - self.at {
            0 => Ok(()),
            excess => Err(DecodeError::TooLong(excess)),
        }
    }
}

/// The error for a field with an invalid value.
pub fn refuse<T>(field: &'static str, value: u64) -> Result<T, DecodeError> {
    Err(DecodeError::Field { field, value })
}

/// A value that is a field of messages.
pub trait Wire: Sized {
    /// Appends the value.
    fn put(&self, out: &mut Vec<u8>);

    /// Takes the value.
    ///
    /// # Errors
    /// If the bytes are not such a value.
    fn take(reader: &mut Reader<'_>) -> Result<Self, DecodeError>;
}

macro_rules! integers {
    ($($type:ty)*) => {$(
        impl Wire for $type {
            fn put(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }

            fn take(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
                let mut bytes = [0; size_of::<$type>()];
                bytes.copy_from_slice(reader.take(size_of::<$type>())?);
                Ok(<$type>::from_le_bytes(bytes))
            }
        }
    )*};
}

integers!(u8 u16 u32 u64 i64);

impl Wire for bool {
    fn put(&self, out: &mut Vec<u8>) {
        out.push((*self).into());
    }

    fn take(reader: &mut Reader<'_>) -> Result<bool, DecodeError> {
        match u8::take(reader)? {
            0 => Ok(false),
            1 => Ok(true),
            other => refuse("flag", other.into()),
        }
    }
}

impl<const N: usize> Wire for [u8; N] {
    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self);
    }

    fn take(reader: &mut Reader<'_>) -> Result<[u8; N], DecodeError> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(reader.take(N)?);
        Ok(bytes)
    }
}

impl<T: Wire> Wire for Option<T> {
    fn put(&self, out: &mut Vec<u8>) {
        self.is_some().put(out);
        if let Some(value) = self {
            value.put(out);
        }
    }

    fn take(reader: &mut Reader<'_>) -> Result<Option<T>, DecodeError> {
        bool::take(reader)?.then(|| T::take(reader)).transpose()
    }
}

/// A string of bytes, such as a name or a path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Text(pub Vec<u8>);

impl Text {
    /// Whether it is a single component of a path: neither empty, `.` nor `..`, and without a slash or NUL.
    pub fn is_component(&self) -> bool {
        let name = &*self.0;
        !matches!(name, b"" | b"." | b"..") && !name.iter().any(|byte| matches!(byte, b'/' | 0))
    }
}

impl From<&[u8]> for Text {
    fn from(bytes: &[u8]) -> Text {
        Text(bytes.to_vec())
    }
}

impl Wire for Text {
    fn put(&self, out: &mut Vec<u8>) {
        // A longer one does not fit into a message, which the length of the message shows.
        let len = self.0.len().min(u16::MAX.into());
        (len as u16).put(out);
        out.extend_from_slice(&self.0);
    }

    fn take(reader: &mut Reader<'_>) -> Result<Text, DecodeError> {
        let len = u16::take(reader)?;
        Ok(Text(reader.take(len.into())?.to_vec()))
    }
}

impl<T: Wire> Wire for Vec<T> {
    fn put(&self, out: &mut Vec<u8>) {
        (self.len().min(u16::MAX.into()) as u16).put(out);
        self.iter().for_each(|element| element.put(out));
    }

    fn take(reader: &mut Reader<'_>) -> Result<Vec<T>, DecodeError> {
        let count = u16::take(reader)?;
        // Grows with the elements that are there, not with the count.
        let mut elements = Vec::new();
        for _ in 0..count {
            elements.push(T::take(reader)?);
        }
        Ok(elements)
    }
}

/// Defines a struct whose fields are encoded in their order.
macro_rules! wire_struct {
    ($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$meta])*
        pub struct $name {
            $($(#[$field_meta])* pub $field: $type,)*
        }

        impl $crate::proto::codec::Wire for $name {
            fn put(&self, out: &mut Vec<u8>) {
                $(self.$field.put(out);)*
            }

            fn take(
                reader: &mut $crate::proto::codec::Reader<'_>,
            ) -> Result<Self, $crate::proto::codec::DecodeError> {
                Ok($name { $($field: <$type as $crate::proto::codec::Wire>::take(reader)?,)* })
            }
        }
    };
}

/// Defines an enum without fields that is encoded as a byte.
macro_rules! wire_enum {
    ($(#[$meta:meta])* $name:ident { $($(#[$variant_meta:meta])* $variant:ident = $value:literal,)* }) => {
        $(#[$meta])*
        pub enum $name {
            $($(#[$variant_meta])* $variant = $value,)*
        }

        impl $crate::proto::codec::Wire for $name {
            fn put(&self, out: &mut Vec<u8>) {
                out.push(*self as u8);
            }

            fn take(
                reader: &mut $crate::proto::codec::Reader<'_>,
            ) -> Result<Self, $crate::proto::codec::DecodeError> {
                match <u8 as $crate::proto::codec::Wire>::take(reader)? {
                    $($value => Ok($name::$variant),)*
                    other => $crate::proto::codec::refuse(stringify!($name), other.into()),
                }
            }
        }
    };
}

/// Defines the bodies of messages in one direction, each with its kind.
macro_rules! wire_messages {
    ($(#[$meta:meta])* $name:ident {
        $($(#[$variant_meta:meta])* $kind:literal $variant:ident { $($field:ident: $type:ty,)* },)*
    }) => {
        $(#[$meta])*
        pub enum $name {
            $($(#[$variant_meta])* #[doc = concat!("\n\nKind ", $kind, ".")]
                $variant { $(#[doc = concat!("`", stringify!($field), "` of the request or answer.")] $field: $type,)* },)*
        }

        impl $name {
            /// The kind in the header.
            fn kind(&self) -> u8 {
                match self {
                    $($name::$variant { .. } => $kind,)*
                }
            }

            fn put(&self, out: &mut Vec<u8>) {
                match self {
                    $($name::$variant { $($field,)* } => { $($field.put(out);)* })*
                }
            }

            /// The body of that kind; `None` if there is no such kind in this direction.
            fn take(
                kind: u8,
                reader: &mut $crate::proto::codec::Reader<'_>,
            ) -> Result<Option<$name>, $crate::proto::codec::DecodeError> {
                Ok(Some(match kind {
                    $($kind => $name::$variant { $($field: <$type as $crate::proto::codec::Wire>::take(reader)?,)* },)*
                    _ => return Ok(None),
                }))
            }
        }
    };
}

pub(super) use {wire_enum, wire_messages, wire_struct};
