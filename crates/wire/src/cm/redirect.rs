//! Where to ask instead: the part of ClassPortInfo (IBTA volume 1, 13.4.8.1) that a redirecting REJ or SIDR_REP
//! carries.

/// Length of ClassPortInfo, which fills the additional information of a REJ.
pub const REDIRECT_BYTES: usize = 72;

/// Another queue pair 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Redirect {
    /// The GID of its port.
    pub gid: [u8; 16],
    /// Partition.
    pub pkey: u16,
    /// Its number, 24 bits: that of a Terrace process holds the slot.
    pub qpn: u32,
    /// The key that datagrams to it need.
    pub qkey: u32,
}

impl Redirect {
    /// Reads additional information; `None` if there is too little, or no queue pair in it.
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

    /// The bytes.
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
