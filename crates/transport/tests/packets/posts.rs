//! Parses work requests and attributes in a script.

use std::net::IpAddr;

use terrace_transport::{
    BindWindow, Datagram, Payload, QpAttr, QpAttrMask, QpState, RecvWr, SendFlags, SendOp, SendWr, Sge,
    SgeList, Target,
};

use crate::support::path_to;
use crate::syntax::Line;

/// Key of the memory that a work request uses when it names none.
const DEFAULT_KEY: u64 = 1;

/// A send work request, after the word `post`.
pub fn send_request(kind: &str, line: &mut Line, peer: IpAddr) -> Result<SendWr, String> {
    let wr_id = line.number("id")?.ok_or("id= is missing")?;
    let op = operation(kind, line)?;
    let payload = match line.text("inline") {
        Some(data) => Payload::Inline(line.data(&data)?.into()),
        None => Payload::Sges(memory(line)?),
    };
    let mut flags = SendFlags::SIGNALED;
    for (name, flag) in [
        ("fence", SendFlags::FENCE),
        ("solicited", SendFlags::SOLICITED),
        ("before", SendFlags::ORDER_BEFORE),
        ("after", SendFlags::ORDER_AFTER),
        ("answered-later", SendFlags::ANSWERED_LATER),
    ] {
        flags.set(flag, line.flag(name));
    }
    flags.set(SendFlags::SIGNALED, !line.flag("unsignaled"));
    let target = match line.number("to_qpn")? {
        Some(qpn) => {
            let qkey = line.small("qkey", 0)?;
            Some(Target::Datagram(Box::new(Datagram { path: path_to(peer), qpn: qpn as u32, qkey })))
        }
        None => line.number("srqn")?.map(|srqn| Target::SharedQueue(srqn as u32)),
    };
    Ok(SendWr { wr_id, op, payload, flags, target })
}

fn operation(kind: &str, line: &mut Line) -> Result<SendOp, String> {
    let imm = line.number("imm")?.map(|imm| (imm as u32).to_be());
    let (va, rkey) = (line.number_or("va", 0)?, line.small("rkey", 0)?);
    Ok(match (kind, imm) {
        ("send", None) => match line.number("inv")? {
            Some(key) => SendOp::SendInvalidate(key as u32),
            None => SendOp::Send,
        },
        ("send", Some(imm)) => SendOp::SendImm(imm),
        ("write", None) => SendOp::Write { va, rkey },
        ("write", Some(imm)) => SendOp::WriteImm { va, rkey, imm },
        ("read", None) => SendOp::Read { va, rkey },
        ("cas", None) => SendOp::CompareSwap {
            va,
            rkey,
            compare: line.number_or("compare", 0)?,
            swap: line.number_or("swap", 0)?,
        },
        ("faa", None) => SendOp::FetchAdd { va, rkey, add: line.number_or("add", 0)? },
        ("atomic-write", None) => SendOp::AtomicWrite { va, rkey },
        ("flush", None) => SendOp::Flush {
            va,
            rkey,
            length: line.small("len", 0)?,
            placement: line.small("placement", 1)?,
            selectivity: line.small("selectivity", 0)?,
        },
        ("append", None) => SendOp::Append { rkey, commit: line.flag("commit") },
        ("invalidate", None) => SendOp::LocalInvalidate(rkey),
        ("bind", None) => {
            let span = line.text("over").ok_or("over= is missing")?;
            let (addr, length) = line.span(&span)?;
            SendOp::BindWindow(BindWindow {
                window_rkey: rkey,
                new_rkey: line.small("new", rkey)?,
                region_lkey: line.small("region", DEFAULT_KEY as u32)?,
                addr,
                length,
                access: 0,
            })
        }
        _ => return Err(format!("cannot post {kind:?}")),
    })
}

/// A receive work request, after `post recv`.
pub fn receive_request(line: &mut Line) -> Result<RecvWr, String> {
    Ok(RecvWr { wr_id: line.number("id")?.ok_or("id= is missing")?, sges: memory(line)? })
}

/// `mem=ADDRESS:LENGTH,...` and `key=`.
fn memory(line: &mut Line) -> Result<SgeList, String> {
    let lkey = line.number_or("key", DEFAULT_KEY)? as u32;
    let Some(spans) = line.text("mem") else { return Ok(SgeList::new()) };
    spans
        .split(',')
        .map(|span| {
            let (addr, length) = line.span(span)?;
            Ok(Sge { addr, length: length as u32, lkey })
        })
        .collect()
}

pub fn state_named(name: &str) -> Result<QpState, String> {
    Ok(match name {
        "reset" => QpState::Reset,
        "init" => QpState::Init,
        "rtr" => QpState::Rtr,
        "rts" => QpState::Rts,
        "sqd" => QpState::Sqd,
        "sqe" => QpState::Sqe,
        "err" => QpState::Err,
        _ => return Err(format!("there is no state {name:?}")),
    })
}

/// Reads the attributes that a line gives into `attr`; returns which.
pub fn attributes(line: &mut Line, attr: &mut QpAttr) -> Result<QpAttrMask, String> {
    let mut mask = QpAttrMask::empty();
    macro_rules! take {
        ($($key:literal => $field:ident, $bit:ident);* $(;)?) => {
            $(if let Some(value) = line.number($key)? {
                attr.$field = value.try_into().map_err(|_| concat!($key, " is too large"))?;
                mask |= QpAttrMask::$bit;
            })*
        };
    }
    take! {
        "mtu" => path_mtu, PATH_MTU;
        "sq_psn" => sq_psn, SQ_PSN;
        "rq_psn" => rq_psn, RQ_PSN;
        "rd" => max_rd_atomic, MAX_QP_RD_ATOMIC;
        "dest_rd" => max_dest_rd_atomic, MAX_DEST_RD_ATOMIC;
        "timeout" => timeout, TIMEOUT;
        "retry" => retry_cnt, RETRY_CNT;
        "rnr_retry" => rnr_retry, RNR_RETRY;
        "rnr_timer" => min_rnr_timer, MIN_RNR_TIMER;
        "qkey" => qkey, QKEY;
        "dest_qpn" => dest_qpn, DEST_QPN;
    }
    if let Some(letters) = line.text("access") {
        attr.access = access_flags(&letters)?;
        mask |= QpAttrMask::ACCESS_FLAGS;
    }
    if line.flag("notify") {
        attr.en_sqd_async_notify = true;
        mask |= QpAttrMask::EN_SQD_ASYNC_NOTIFY;
    }
    Ok(mask)
}

fn access_flags(letters: &str) -> Result<u32, String> {
    use terrace_transport::access;
    letters.chars().filter(|letter| *letter != '-').try_fold(0, |flags, letter| {
        Ok(flags
            | match letter {
                'r' => access::REMOTE_READ,
                'w' => access::REMOTE_WRITE,
                'a' => access::REMOTE_ATOMIC,
                'g' => access::FLUSH_GLOBAL,
                'p' => access::FLUSH_PERSISTENT,
                _ => return Err(format!("there is no access {letter:?}")),
            })
    })
}
