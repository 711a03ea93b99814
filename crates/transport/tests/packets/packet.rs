//! Packets in a script's syntax: builds the injected ones and checks the sent ones.

use std::collections::BTreeMap;
use std::fmt;

use terrace_transport::QpType;
use terrace_wire::{
    Aeth, AppendEth, AppendFlags, AtomicEth, Bth, Deth, Extensions, Feth, Headers, NakCode, Opcode,
    Operation, Packet, Psn, Reth, Service, Syndrome, emit_headers,
};

use crate::syntax::Line;

const NAK_NAMES: [(&str, NakCode); 4] = [
    ("sequence", NakCode::PsnSequence),
    ("invalid", NakCode::InvalidRequest),
    ("access", NakCode::RemoteAccess),
    ("operation", NakCode::RemoteOperation),
];

const FLAGS: [&str; 4] = ["ack", "se", "becn", "fecn"];

const FIELDS: [&str; 20] = [
    "psn", "qpn", "pkey", "va", "rkey", "len", "imm", "inv", "swap", "compare", "add", "value", "msn",
    "timer", "qkey", "src", "credits", "nak", "srqn", "aflags",
];

/// A packet in a script's terms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Described {
    name: String,
    flags: Vec<&'static str>,
    fields: BTreeMap<&'static str, u64>,
    payload: Payload,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Payload {
    Bytes(Vec<u8>),
    /// The script gives the length only.
    Len(usize),
}

impl Payload {
    fn len(&self) -> usize {
        match self {
            Payload::Bytes(bytes) => bytes.len(),
            Payload::Len(len) => *len,
        }
    }
}

/// The packets that one line of a script stands for: several when `psn` is a range.
pub fn parse(mut line: Line) -> Result<Vec<Described>, String> {
    let mut name = line.word("the packet's name")?;
    if name == "NAK" {
        name = format!("NAK {}", line.word("the kind of NAK")?);
    }
    let flags = FLAGS.into_iter().filter(|flag| line.flag(flag)).collect();
    let psns = line.range("psn")?;
    let mut fields = BTreeMap::new();
    for key in FIELDS.into_iter().chain(["placement", "selectivity"]) {
        if let Some(value) = line.number(key)? {
            fields.insert(key, value);
        }
    }
    let (data, payload_len) = (line.text("data"), line.number("payload")?);
    let (first, last) = psns.unwrap_or((0, 0));
    let mut packets = Vec::new();
    for step in 0..=(last.wrapping_sub(first) & 0xff_ffff) {
        let payload = match &data {
            Some(data) => Payload::Bytes(line.data_at_step(data, step)?),
            None => Payload::Len(payload_len.unwrap_or(0) as usize),
        };
        let mut packet =
            Described { name: name.clone(), flags: Vec::clone(&flags), fields: fields.clone(), payload };
        if psns.is_some() {
            packet.fields.insert("psn", (first + step) & 0xff_ffff);
        }
        packets.push(packet);
    }
    line.finish()?;
    Ok(packets)
}

impl Described {
    /// The bytes of this packet, for a queue pair of this kind. Fields that are not given are 0; the syndrome of a
    /// response is a plain ACK.
    pub fn to_bytes(&self, qp_type: QpType) -> Result<Vec<u8>, String> {
        let field = |key: &str| self.fields.get(key).copied().unwrap_or(0);
        let (opcode, syndrome) = self.opcode(qp_type)?;
        let info = opcode.info();
        let payload = match &self.payload {
            Payload::Bytes(bytes) => bytes.clone(),
            Payload::Len(len) => vec![0x5a; *len],
        };
        let pad = payload.len().wrapping_neg() & 3;
        let has = |flag| self.flags.contains(&flag);
        let bth = Bth {
            opcode,
            solicited: has("se"),
            migrated: true,
            pad: pad as u8,
            pkey: self.fields.get("pkey").map_or(0xffff, |pkey| *pkey as u16),
            fecn: has("fecn"),
            becn: has("becn"),
            qpn: self.fields.get("qpn").map_or(0x11, |qpn| *qpn as u32),
            ack_request: has("ack"),
            psn: Psn::new(field("psn") as u32),
        };
        let swap_or_add = if info.operation == Operation::FetchAdd { field("add") } else { field("swap") };
        let (va, rkey) = (field("va"), field("rkey") as u32);
        let syndrome = match self.fields.get("nak") {
            Some(code) => Syndrome::Nak(NAK_NAMES.get(*code as usize).ok_or("no such code")?.1),
            None => syndrome,
        };
        let ext = Extensions {
            reth: Some(Reth { va, rkey, length: field("len") as u32 }),
            aeth: Some(Aeth { syndrome, msn: field("msn") as u32 }),
            atomic: Some(AtomicEth { va, rkey, swap_or_add, compare: field("compare") }),
            atomic_ack: Some(field("value")),
            imm: Some((field("imm") as u32).to_be()),
            ieth: Some(field("inv") as u32),
            deth: Some(Deth { qkey: field("qkey") as u32, source_qpn: field("src") as u32 }),
            feth: Some(Feth { placement: field("placement") as u8, selectivity: field("selectivity") as u8 }),
            xrc_srqn: Some(field("srqn") as u32),
            append: Some(AppendEth {
                rkey,
                length: field("len") as u32,
                flags: AppendFlags::from_bits_retain(field("aflags") as u32),
            }),
        };
        let mut bytes = vec![0; info.header_len];
        emit_headers(&bth, &ext, &mut bytes).map_err(|error| error.to_string())?;
        bytes.extend_from_slice(&payload);
        bytes.resize(bytes.len() + pad, 0);
        Ok(bytes)
    }

    fn opcode(&self, qp_type: QpType) -> Result<(Opcode, Syndrome), String> {
        let acknowledge = match qp_type.service() {
            Service::Xrc => Opcode::XrcAcknowledge,
            _ => Opcode::RcAcknowledge,
        };
        let ack = Syndrome::Ack { credits: self.fields.get("credits").map_or(31, |credits| *credits as u8) };
        if let Some(kind) = self.name.strip_prefix("NAK ") {
            let code = NAK_NAMES.iter().find(|(name, _)| *name == kind).map(|(_, code)| *code);
            let code = code.ok_or_else(|| format!("there is no NAK {kind:?}"))?;
            return Ok((acknowledge, Syndrome::Nak(code)));
        }
        let service = match qp_type {
            QpType::Rc => "RC",
            QpType::Uc => "UC",
            QpType::Ud => "UD",
            QpType::XrcSend | QpType::XrcRecv => "XRC",
        };
        match self.name.as_str() {
            "ACK" => return Ok((acknowledge, ack)),
            "RNR" => {
                let timer = self.fields.get("timer").map_or(0, |timer| *timer as u8);
                return Ok((acknowledge, Syndrome::RnrNak { timer }));
            }
            _ => {}
        }
        let full_name = format!("{service}_{}", self.name);
        Opcode::all()
            .find(|opcode| opcode.info().name == full_name || opcode.info().name == self.name)
            .map(|opcode| (opcode, ack))
            .ok_or_else(|| format!("there is no packet {full_name}"))
    }

    /// Describes a packet that the queue pair sent.
    pub fn of(packet: &Packet<'_>) -> Described {
        let (bth, ext, info) = (&packet.bth, &packet.ext, packet.bth.opcode.info());
        let flags = [("ack", bth.ack_request), ("se", bth.solicited), ("becn", bth.becn), ("fecn", bth.fecn)];
        let mut fields = BTreeMap::from([
            ("psn", u64::from(bth.psn.get())),
            ("qpn", u64::from(bth.qpn)),
            ("pkey", u64::from(bth.pkey)),
        ]);
        let short = info.name.split_once('_').map_or(info.name, |(_, short)| short);
        let mut name = short.to_owned();
        if let Some(aeth) = ext.aeth {
            fields.insert("msn", aeth.msn.into());
            if info.operation == Operation::Acknowledge {
                name = answer_name(aeth.syndrome, &mut fields);
            }
        }
        if let Some(reth) = ext.reth {
            fields.extend([("va", reth.va), ("rkey", reth.rkey.into()), ("len", reth.length.into())]);
        }
        if let Some(atomic) = ext.atomic {
            fields.extend([("va", atomic.va), ("rkey", atomic.rkey.into())]);
            if info.operation == Operation::FetchAdd {
                fields.insert("add", atomic.swap_or_add);
            } else {
                fields.extend([("swap", atomic.swap_or_add), ("compare", atomic.compare)]);
            }
        }
        if let Some(append) = ext.append {
            let flags = append.flags.bits();
            fields.extend([
                ("rkey", append.rkey.into()),
                ("len", append.length.into()),
                ("aflags", flags.into()),
            ]);
        }
        if let Some(deth) = ext.deth {
            fields.extend([("qkey", deth.qkey.into()), ("src", deth.source_qpn.into())]);
        }
        if let Some(feth) = ext.feth {
            fields.extend([("placement", feth.placement.into()), ("selectivity", feth.selectivity.into())]);
        }
        let optional = [
            ("value", ext.atomic_ack),
            ("imm", ext.imm.map(|imm| u32::from_be(imm).into())),
            ("inv", ext.ieth.map(u64::from)),
            ("srqn", ext.xrc_srqn.map(u64::from)),
        ];
        fields.extend(optional.into_iter().filter_map(|(key, value)| Some((key, value?))));
        Described {
            name,
            flags: flags.into_iter().filter(|(_, set)| *set).map(|(flag, _)| flag).collect(),
            fields,
            payload: Payload::Bytes(packet.payload.to_vec()),
        }
    }

    /// Compares a sent packet with this expectation: name, flags, payload and the fields that the script gives must
    /// agree. Returns the differences.
    pub fn differences(&self, seen: &Described) -> Vec<String> {
        let mut differences = Vec::new();
        if self.name != seen.name {
            differences.push(format!("expected {}, got {}", self.name, seen.name));
        }
        if self.flags != seen.flags {
            differences.push(format!("flags: expected {:?}, got {:?}", self.flags, seen.flags));
        }
        for (key, value) in &self.fields {
            match seen.fields.get(key) {
                Some(got) if got == value => {}
                Some(got) => differences.push(format!("{key}: expected {value:#x}, got {got:#x}")),
                None => differences.push(format!("{key}: expected {value:#x}, got none")),
            }
        }
        if self.payload.len() != seen.payload.len() {
            differences.push(format!("payload: expected {}, got {}", self.payload.len(), seen.payload.len()));
        } else if let (Payload::Bytes(expected), Payload::Bytes(got)) = (&self.payload, &seen.payload)
            && let Some(at) = (0..got.len()).find(|at| expected[*at] != got[*at])
        {
            differences
                .push(format!("payload: byte {at} should be {:#04x}, is {:#04x}", expected[at], got[at]));
        }
        differences
    }
}

fn answer_name(syndrome: Syndrome, fields: &mut BTreeMap<&'static str, u64>) -> String {
    match syndrome {
        Syndrome::Ack { credits } => {
            fields.insert("credits", credits.into());
            "ACK".to_owned()
        }
        Syndrome::RnrNak { timer } => {
            fields.insert("timer", timer.into());
            "RNR".to_owned()
        }
        Syndrome::Nak(code) => {
            let name = NAK_NAMES.iter().find(|(_, known)| *known == code).map_or("unknown", |(name, _)| name);
            format!("NAK {name}")
        }
    }
}

impl fmt::Display for Described {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.name)?;
        for key in FIELDS.into_iter().chain(["placement", "selectivity"]) {
            let Some(value) = self.fields.get(key) else { continue };
            match key {
                "psn" | "msn" | "len" | "timer" | "add" | "value" => write!(f, " {key}={value}")?,
                _ => write!(f, " {key}={value:#x}")?,
            }
        }
        match &self.payload {
            Payload::Bytes(bytes) if (1..=8).contains(&bytes.len()) => {
                let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
                write!(f, " data=x:{hex}")?;
            }
            payload if payload.len() > 0 => write!(f, " payload={}", payload.len())?,
            _ => {}
        }
        self.flags.iter().try_for_each(|flag| write!(f, " {flag}"))
    }
}

/// Checks that the bytes are exactly one well-formed packet: emitting the parsed packet gives the same bytes.
pub fn check_well_formed(bytes: &[u8]) -> Result<Packet<'_>, String> {
    let packet = Packet::parse(bytes).map_err(|error| format!("malformed packet: {error}"))?;
    let info = packet.bth.opcode.info();
    let mut head = vec![0; info.header_len];
    emit_headers(&packet.bth, &packet.ext, &mut head).map_err(|error| error.to_string())?;
    if head != bytes[..head.len()] {
        return Err("reserved bits are set".to_owned());
    }
    let pad = &bytes[info.header_len + packet.payload.len()..];
    if pad.iter().any(|byte| *byte != 0) || !(packet.payload.len() + pad.len()).is_multiple_of(4) {
        return Err("the pad is wrong".to_owned());
    }
    if info.headers.contains(Headers::DETH) != (info.service == Service::Ud) {
        return Err("a datagram header where none belongs".to_owned());
    }
    let is_request = !matches!(
        info.operation,
        Operation::Acknowledge | Operation::ReadResponse | Operation::AtomicAcknowledge
    );
    if info.headers.contains(Headers::XRCETH) != (info.service == Service::Xrc && is_request) {
        return Err("a shared receive queue's number where none belongs".to_owned());
    }
    Ok(packet)
}
