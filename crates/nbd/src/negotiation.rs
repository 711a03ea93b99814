//! A connection before its transmission phase: greeting, flags, options.

use crate::protocol::{
    FIXED_NEWSTYLE, INFO_BLOCK_SIZE, INFO_EXPORT, MAGIC, NO_ZEROES, OPT_ABORT, OPT_EXPORT_NAME, OPT_GO,
    OPT_INFO, OPT_LIST, OPTION_BYTES, OPTION_MAGIC, ProtocolError, REP_ACK, REP_ERR_INVALID, REP_ERR_TOO_BIG,
    REP_ERR_UNKNOWN, REP_ERR_UNSUP, REP_INFO, REP_SERVER, TRANSMISSION_FLAGS, be16, be32, be64,
    put_option_reply,
};

/// Data of an option at most: a name of 4096 bytes, and what surrounds it.
const OPTION_DATA_MAX: usize = 8192;
/// Options of a connection at most, so that their replies have a bounded size.
const OPTIONS_MAX: u32 = 64;
const FLAGS_BYTES: usize = 4;
/// Zeros after the answer to `NBD_OPT_EXPORT_NAME`.
const RESERVED_BYTES: usize = 124;

/// What is told about the only export, whose name is empty.
#[derive(Clone, Copy, Debug)]
pub struct Export {
    pub size_bytes: u64,
    pub preferred_block_bytes: u32,
    pub request_bytes_max: u32,
}

/// What a negotiation has led to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// More bytes are needed.
    Pending,
    /// Requests follow.
    Transmission,
    /// The client has ended the connection.
    Aborted,
}

/// The state of a negotiation.
#[derive(Debug)]
pub struct Negotiation {
    export: Export,
    has_flags: bool,
    omits_zeroes: bool,
    option_count: u32,
    /// Bytes of a refused option that are still to come.
    skipped_bytes: u32,
}

impl Negotiation {
    /// Greets the client.
    pub fn begin(export: Export, out: &mut Vec<u8>) -> Negotiation {
        out.extend_from_slice(&MAGIC.to_be_bytes());
        out.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
        out.extend_from_slice(&(FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes());
        Negotiation { export, has_flags: false, omits_zeroes: false, option_count: 0, skipped_bytes: 0 }
    }

    /// Handles what is complete of the client's bytes. Returns how many were, and what follows. Bytes that were not are to
    /// be given again, with more of them.
    pub fn handle_input(
        &mut self,
        bytes: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(usize, Outcome), ProtocolError> {
        let mut used = 0;
        loop {
            let rest = &bytes[used..];
            let (count, outcome) = self.handle_message(rest, out)?;
            used += count;
            if outcome != Outcome::Pending || count == 0 {
                return Ok((used, outcome));
            }
        }
    }

    fn handle_message(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<(usize, Outcome), ProtocolError> {
        if !self.has_flags {
            if bytes.len() < FLAGS_BYTES {
                return Ok((0, Outcome::Pending));
            }
            let flags = be32(bytes, 0);
            if flags & !u32::from(FIXED_NEWSTYLE | NO_ZEROES) != 0 {
                return Err(ProtocolError::HandshakeFlags(flags));
            }
            self.has_flags = true;
            self.omits_zeroes = flags & u32::from(NO_ZEROES) != 0;
            return Ok((FLAGS_BYTES, Outcome::Pending));
        }
        if self.skipped_bytes > 0 {
            let count = bytes.len().min(self.skipped_bytes as usize);
            self.skipped_bytes -= count as u32;
            return Ok((count, Outcome::Pending));
        }
        if bytes.len() < OPTION_BYTES {
            return Ok((0, Outcome::Pending));
        }
        if be64(bytes, 0) != OPTION_MAGIC {
            return Err(ProtocolError::Magic);
        }
        let (option, length) = (be32(bytes, 8), be32(bytes, 12));
        let data = &bytes[OPTION_BYTES..];
        if length as usize <= OPTION_DATA_MAX && data.len() < length as usize {
            return Ok((0, Outcome::Pending));
        }
        self.option_count += 1;
        if self.option_count > OPTIONS_MAX {
            return Err(ProtocolError::TooManyOptions);
        }
        let Some(data) = data.get(..length as usize).filter(|data| data.len() <= OPTION_DATA_MAX) else {
            if option == OPT_EXPORT_NAME {
                return Err(ProtocolError::UnknownExport);
            }
            self.skipped_bytes = length;
            put_option_reply(out, option, REP_ERR_TOO_BIG, &[]);
            return Ok((OPTION_BYTES, Outcome::Pending));
        };
        Ok((OPTION_BYTES + data.len(), self.handle_option(option, data, out)?))
    }

    fn handle_option(&self, option: u32, data: &[u8], out: &mut Vec<u8>) -> Result<Outcome, ProtocolError> {
        match option {
            OPT_EXPORT_NAME if data.is_empty() => {
                out.extend_from_slice(&self.export.size_bytes.to_be_bytes());
                out.extend_from_slice(&TRANSMISSION_FLAGS.to_be_bytes());
                if !self.omits_zeroes {
                    out.extend_from_slice(&[0; RESERVED_BYTES]);
                }
                return Ok(Outcome::Transmission);
            }
            OPT_EXPORT_NAME => return Err(ProtocolError::UnknownExport),
            OPT_ABORT => {
                put_option_reply(out, option, REP_ACK, &[]);
                return Ok(Outcome::Aborted);
            }
            OPT_LIST if data.is_empty() => {
                // The length of the export's name, which is empty.
                put_option_reply(out, option, REP_SERVER, &0u32.to_be_bytes());
                put_option_reply(out, option, REP_ACK, &[]);
            }
            OPT_LIST => put_option_reply(out, option, REP_ERR_INVALID, &[]),
            OPT_INFO | OPT_GO => return Ok(self.describe_export(option, data, out)),
            _ => put_option_reply(out, option, REP_ERR_UNSUP, &[]),
        }
        Ok(Outcome::Pending)
    }

    /// Answers INFO and GO.
    fn describe_export(&self, option: u32, data: &[u8], out: &mut Vec<u8>) -> Outcome {
        let Some((name, wants_block_size)) = decode_info_request(data) else {
            put_option_reply(out, option, REP_ERR_INVALID, &[]);
            return Outcome::Pending;
        };
        if !name.is_empty() {
            put_option_reply(out, option, REP_ERR_UNKNOWN, &[]);
            return Outcome::Pending;
        }
        let mut info = [0; 14];
        info[..2].copy_from_slice(&INFO_EXPORT.to_be_bytes());
        info[2..10].copy_from_slice(&self.export.size_bytes.to_be_bytes());
        info[10..12].copy_from_slice(&TRANSMISSION_FLAGS.to_be_bytes());
        put_option_reply(out, option, REP_INFO, &info[..12]);
        if wants_block_size {
            // Minimum, preferred, maximum.
            info[..2].copy_from_slice(&INFO_BLOCK_SIZE.to_be_bytes());
            info[2..6].copy_from_slice(&1u32.to_be_bytes());
            info[6..10].copy_from_slice(&self.export.preferred_block_bytes.to_be_bytes());
            info[10..14].copy_from_slice(&self.export.request_bytes_max.to_be_bytes());
            put_option_reply(out, option, REP_INFO, &info);
        }
        put_option_reply(out, option, REP_ACK, &[]);
        if option == OPT_GO { Outcome::Transmission } else { Outcome::Pending }
    }
}

/// The name of the export, and whether its block size is asked for. `None` if lengths are wrong.
fn decode_info_request(data: &[u8]) -> Option<(&[u8], bool)> {
    let (name_length, rest) = data.split_first_chunk()?;
    let (name, rest) = rest.split_at_checked(u32::from_be_bytes(*name_length) as usize)?;
    let (count, kinds) = rest.split_first_chunk()?;
    if kinds.len() != 2 * usize::from(u16::from_be_bytes(*count)) {
        return None;
    }
    Some((name, kinds.chunks_exact(2).any(|kind| be16(kind, 0) == INFO_BLOCK_SIZE)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXPORT: Export =
        Export { size_bytes: 1 << 30, preferred_block_bytes: 4096, request_bytes_max: 1 << 22 };

    fn option(number: u32, data: &[u8]) -> Vec<u8> {
        let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
        bytes.extend_from_slice(&number.to_be_bytes());
        bytes.extend_from_slice(&(data.len() as u32).to_be_bytes());
        bytes.extend_from_slice(data);
        bytes
    }

    /// The outcome and the reply codes of options, which are given byte by byte.
    fn negotiate(flags: u32, options: &[Vec<u8>]) -> Result<(Outcome, Vec<u32>, Vec<u8>), ProtocolError> {
        let mut out = Vec::new();
        let mut negotiation = Negotiation::begin(EXPORT, &mut out);
        assert_eq!(out.len(), 18);
        out.clear();
        let bytes = [flags.to_be_bytes().to_vec(), options.concat()].concat();
        let (mut begin, mut outcome) = (0, Outcome::Pending);
        for end in 0..=bytes.len() {
            let (used, now) = negotiation.handle_input(&bytes[begin..end], &mut out)?;
            begin += used;
            outcome = now;
        }
        assert_eq!(begin, bytes.len());
        let (mut replies, mut rest) = (Vec::new(), out.as_slice());
        while rest.len() >= 20 && be64(rest, 0) == crate::protocol::OPTION_REPLY_MAGIC {
            replies.push(be32(rest, 12));
            rest = &rest[20 + be32(rest, 16) as usize..];
        }
        Ok((outcome, replies, rest.to_vec()))
    }

    #[test]
    fn go_describes_the_export_and_begins_transmission() {
        let plain = option(OPT_GO, &[0, 0, 0, 0, 0, 0]);
        assert_eq!(negotiate(3, &[plain]), Ok((Outcome::Transmission, vec![REP_INFO, REP_ACK], vec![])));
        let with_sizes = option(OPT_INFO, &[0, 0, 0, 0, 0, 1, 0, 3]);
        assert_eq!(
            negotiate(3, &[with_sizes]),
            Ok((Outcome::Pending, vec![REP_INFO, REP_INFO, REP_ACK], vec![]))
        );
    }

    #[test]
    fn export_name_answers_with_or_without_zeros() {
        let (outcome, _, rest) = negotiate(3, &[option(OPT_EXPORT_NAME, b"")]).expect("a valid name");
        assert_eq!((outcome, rest.len()), (Outcome::Transmission, 10));
        let (_, _, rest) = negotiate(1, &[option(OPT_EXPORT_NAME, b"")]).expect("a valid name");
        assert_eq!((be64(&rest, 0), rest.len()), (1 << 30, 134));
        assert_eq!(negotiate(3, &[option(OPT_EXPORT_NAME, b"other")]), Err(ProtocolError::UnknownExport));
    }

    #[test]
    fn unknown_wrong_and_long_options_are_refused_and_the_next_is_answered() {
        let options = [
            option(5, b""),
            option(OPT_LIST, b"x"),
            option(OPT_GO, &[0, 0, 0, 9, 0, 0]),
            option(OPT_GO, &[0, 0, 0, 0, 0, 2, 0, 3]),
            option(OPT_INFO, &[0, 0, 0, 1, b'x', 0, 0]),
            option(8, &[0; OPTION_DATA_MAX + 1]),
            option(OPT_LIST, b""),
            option(OPT_ABORT, b""),
        ];
        let invalid = REP_ERR_INVALID;
        let replies = vec![
            REP_ERR_UNSUP,
            invalid,
            invalid,
            invalid,
            REP_ERR_UNKNOWN,
            REP_ERR_TOO_BIG,
            REP_SERVER,
            REP_ACK,
            REP_ACK,
        ];
        assert_eq!(negotiate(3, &options), Ok((Outcome::Aborted, replies, vec![])));
    }

    #[test]
    fn wrong_flags_magic_and_endless_options_end_the_connection() {
        assert_eq!(negotiate(4, &[]), Err(ProtocolError::HandshakeFlags(4)));
        assert_eq!(negotiate(3, &[vec![0; 16]]), Err(ProtocolError::Magic));
        assert_eq!(negotiate(3, &vec![option(5, b""); 65]), Err(ProtocolError::TooManyOptions));
    }
}
