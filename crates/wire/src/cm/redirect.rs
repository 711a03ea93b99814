//! Redirection target: the part of ClassPortInfo (IBTA volume 1, 13.4.8.1) in a redirecting REJ or SIDR_REP.

/// Length of ClassPortInfo, which fills the additional information of a REJ.
pub const REDIRECT_BYTES: usize = 72;

/// Another queue pair 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Redirect {
    /// The GID of the queue pair's port.
    pub gid: [u8; 16],
    /// Partition.
    pub pkey: u16,
    /// The queue pair's number, 24 bits. The upper bits of a Terrace process's number are the process's instance index.
    pub qpn: u32,
    /// The Q_Key for datagrams to the queue pair.
    pub qkey: u32,
}

impl Redirect {
    /// Reads additional information; `None` if it is too short or has no queue pair.
    pub fn decode(info: &[u8]) -> Option<Redirect> {
        let bytes = info.first_chunk::<REDIRECT_BYTES>()?;
        let mut gid = [0; 16];
        gid.copy_from_slice(&bytes[8..24]);
        let qpn = u32::from_be_bytes([0, bytes[33], bytes[34], bytes[35]]);
        let redirect = Redirect {
            gid,
            pkey: u16::from_be_bytes([bytes[30], bytes[31]]),
            qpn,
            qkey: u32::from_be_bytes([bytes[36], bytes[37], bytes[38], bytes[39]]),
        };
        (qpn != 0).then_some(redirect)
    }

    /// Writes the additional information.
    pub fn encode(&self) -> [u8; REDIRECT_BYTES] {
        let mut bytes = [0; REDIRECT_BYTES];
        // Base version 1, class version 2 of communication management.
        bytes[..2].copy_from_slice(&[1, 2]);
        bytes[8..24].copy_from_slice(&self.gid);
        bytes[30..32].copy_from_slice(&self.pkey.to_be_bytes());
        bytes[32..36].copy_from_slice(&(self.qpn & 0xff_ffff).to_be_bytes());
        bytes[36..40].copy_from_slice(&self.qkey.to_be_bytes());
        bytes
    }
}
