//! The queue pair state machine: every pair of states for every type of queue pair, against a second table: the
//! kernel's (`ib_modify_qp_is_ok`), which hardware drivers and rxe both use.

mod support;

use std::net::IpAddr;

use smallvec::smallvec;
use support::host::{Event, Memory};
use support::sink::Collector;
use support::{bring_up, path_to, required};
use terrace_transport::{
    AckPolicy, Datagram, ModifyError, Payload, Qp, QpAttr, QpAttrMask as M, QpCap, QpConfig, QpState,
    QpState as S, QpType, QpType as T, SendFlags, SendOp, SendWr, Sge, Target, Time,
};

const STATES: [S; 7] = [S::Reset, S::Init, S::Rtr, S::Rts, S::Sqd, S::Sqe, S::Err];
const TYPES: [T; 5] = [T::Rc, T::Uc, T::Ud, T::XrcSend, T::XrcRecv];

const CONNECTED: &[T] = &[T::Rc, T::Uc, T::XrcSend, T::XrcRecv];
const RC: &[T] = &[T::Rc];
/// The initiator and the target of XRC.
const INI: &[T] = &[T::XrcSend];
const TGT: &[T] = &[T::XrcRecv];
const UC: &[T] = &[T::Uc];
const UD: &[T] = &[T::Ud];
const ALL: &[T] = &TYPES;

/// Queue pair types, from, to, required attributes, optional attributes. Other transitions are refused.
const TABLE: &[(&[T], S, S, &str, &str)] = &[
    (ALL, S::Reset, S::Reset, "", ""),
    (CONNECTED, S::Reset, S::Init, "pkey port access", ""),
    (UD, S::Reset, S::Init, "pkey port qkey", ""),
    (ALL, S::Init, S::Reset, "", ""),
    (ALL, S::Init, S::Err, "", ""),
    (CONNECTED, S::Init, S::Init, "", "pkey port access"),
    (UD, S::Init, S::Init, "", "pkey port qkey"),
    (RC, S::Init, S::Rtr, "av mtu dest rq_psn dest_rd rnr_timer", "alt access pkey"),
    (INI, S::Init, S::Rtr, "av mtu dest rq_psn", "alt access pkey"),
    (TGT, S::Init, S::Rtr, "av mtu dest rq_psn dest_rd rnr_timer", "alt access pkey"),
    (UC, S::Init, S::Rtr, "av mtu dest rq_psn", "alt access pkey"),
    (UD, S::Init, S::Rtr, "", "pkey qkey"),
    (ALL, S::Rtr, S::Reset, "", ""),
    (ALL, S::Rtr, S::Err, "", ""),
    (RC, S::Rtr, S::Rts, "timeout retry rnr_retry sq_psn rd", "cur alt access rnr_timer mig"),
    (INI, S::Rtr, S::Rts, "timeout retry rnr_retry sq_psn rd", "cur alt access mig"),
    (TGT, S::Rtr, S::Rts, "timeout sq_psn", "cur alt access rnr_timer mig"),
    (UC, S::Rtr, S::Rts, "sq_psn", "cur alt access mig"),
    (UD, S::Rtr, S::Rts, "sq_psn", "cur qkey"),
    (ALL, S::Rts, S::Reset, "", ""),
    (ALL, S::Rts, S::Err, "", ""),
    (RC, S::Rts, S::Rts, "", "cur access alt mig rnr_timer"),
    (INI, S::Rts, S::Rts, "", "cur access alt mig"),
    (TGT, S::Rts, S::Rts, "", "cur access alt mig rnr_timer"),
    (UC, S::Rts, S::Rts, "", "cur access alt mig"),
    (UD, S::Rts, S::Rts, "", "cur qkey"),
    (ALL, S::Rts, S::Sqd, "", "notify"),
    (ALL, S::Sqd, S::Reset, "", ""),
    (ALL, S::Sqd, S::Err, "", ""),
    (RC, S::Sqd, S::Rts, "", "cur alt access rnr_timer mig"),
    (INI, S::Sqd, S::Rts, "", "cur alt access mig"),
    (TGT, S::Sqd, S::Rts, "", "cur alt access rnr_timer mig"),
    (UC, S::Sqd, S::Rts, "", "cur alt access mig"),
    (UD, S::Sqd, S::Rts, "", "cur qkey"),
    (RC, S::Sqd, S::Sqd, "", "port av timeout retry rnr_retry rd dest_rd alt access pkey rnr_timer mig"),
    (INI, S::Sqd, S::Sqd, "", "port av timeout retry rnr_retry rd alt access pkey mig"),
    (TGT, S::Sqd, S::Sqd, "", "port av timeout dest_rd alt access pkey rnr_timer mig"),
    (UC, S::Sqd, S::Sqd, "", "av alt access pkey mig"),
    (UD, S::Sqd, S::Sqd, "", "pkey qkey"),
    (&[T::Uc, T::Ud], S::Sqe, S::Reset, "", ""),
    (&[T::Uc, T::Ud], S::Sqe, S::Err, "", ""),
    (UC, S::Sqe, S::Rts, "", "cur access"),
    (UD, S::Sqe, S::Rts, "", "cur qkey"),
    (ALL, S::Err, S::Reset, "", ""),
    (ALL, S::Err, S::Err, "", ""),
];

const NAMES: [(&str, M); 21] = [
    ("cur", M::CUR_STATE),
    ("notify", M::EN_SQD_ASYNC_NOTIFY),
    ("access", M::ACCESS_FLAGS),
    ("pkey", M::PKEY_INDEX),
    ("port", M::PORT),
    ("qkey", M::QKEY),
    ("av", M::AV),
    ("mtu", M::PATH_MTU),
    ("timeout", M::TIMEOUT),
    ("retry", M::RETRY_CNT),
    ("rnr_retry", M::RNR_RETRY),
    ("rq_psn", M::RQ_PSN),
    ("rd", M::MAX_QP_RD_ATOMIC),
    ("alt", M::ALT_PATH),
    ("rnr_timer", M::MIN_RNR_TIMER),
    ("sq_psn", M::SQ_PSN),
    ("dest_rd", M::MAX_DEST_RD_ATOMIC),
    ("mig", M::PATH_MIG_STATE),
    ("cap", M::CAP),
    ("dest", M::DEST_QPN),
    ("rate", M::RATE_LIMIT),
];

fn mask(names: &str) -> M {
    let find = |name: &str| NAMES.iter().find(|(known, _)| *known == name).expect("a known name").1;
    names.split_whitespace().map(find).collect()
}

fn peer() -> IpAddr {
    IpAddr::from([10, 0, 0, 2])
}

fn good_attributes() -> QpAttr {
    QpAttr {
        path_mtu: 1024,
        qkey: 7,
        rq_psn: 8,
        sq_psn: 9,
        dest_qpn: 10,
        access: 14,
        path: Some(path_to(peer())),
        max_rd_atomic: 3,
        max_dest_rd_atomic: 4,
        min_rnr_timer: 5,
        port_num: 1,
        timeout: 14,
        retry_cnt: 6,
        rnr_retry: 7,
        ..QpAttr::default()
    }
}

fn new_queue_pair(qp_type: QpType) -> Qp {
    Qp::new(QpConfig {
        qpn: 0x11,
        qp_type,
        cap: QpCap { max_send_wr: 4, max_recv_wr: 4, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 },
        sq_sig_all: true,
        has_srq: false,
        window_bytes: 1 << 20,
        rd_atomic_limit: 16,
        mtu_limit: 2048,
    })
}

/// A queue pair in a state; `None` if its type lacks that state.
fn queue_pair_in(qp_type: QpType, state: QpState) -> Option<Qp> {
    let mut qp = new_queue_pair(qp_type);
    if state != S::Sqe {
        bring_up(&mut qp, &good_attributes(), state);
        return Some(qp);
    }
    bring_up(&mut qp, &good_attributes(), S::Rts);
    if qp_type == T::XrcRecv {
        // An XRC target sends no requests, so none can fail.
        return None;
    }
    fail_a_send(&mut qp);
    (qp.state() == S::Sqe).then_some(qp)
}

/// Posts a send from memory that does not exist.
fn fail_a_send(qp: &mut Qp) {
    let mut wr = SendWr {
        wr_id: 1,
        op: SendOp::Send,
        payload: Payload::Sges(smallvec![Sge { addr: 0, length: 8, lkey: 99 }]),
        flags: SendFlags::SIGNALED,
        target: Some(match qp.config().qp_type {
            T::XrcSend => Target::SharedQueue(1),
            _ => Target::Datagram(Box::new(Datagram { path: path_to(peer()), qpn: 1, qkey: 1 })),
        }),
    };
    let host = Memory::new(16);
    qp.post_send(|| Time(1), &mut wr, &host, &mut ()).expect("RTS takes sends");
    qp.poll_transmit(|| Time(1), &host, &mut Collector::default(), AckPolicy::Now);
    assert!(matches!(host.poll_event(), Some(Event::SendComplete(_))));
}

fn attributes_of(qp_type: QpType, from: QpState, to: QpState) -> Option<(M, M)> {
    let row = TABLE.iter().find(|row| row.0.contains(&qp_type) && row.1 == from && row.2 == to)?;
    Some((mask(row.3), mask(row.4)))
}

/// Every type of queue pair in each of its states, with every target state.
fn each_pair() -> impl Iterator<Item = (QpType, QpState, QpState)> {
    let pairs = TYPES.into_iter().flat_map(|qp_type| STATES.map(|from| (qp_type, from)));
    pairs
        .filter(|(qp_type, from)| queue_pair_in(*qp_type, *from).is_some())
        .flat_map(|(qp_type, from)| STATES.map(|to| (qp_type, from, to)))
}

/// Tries a transition on a fresh queue pair. A refused transition changes nothing.
fn try_modify(qp_type: QpType, from: QpState, to: QpState, mask: M) -> Result<QpState, ModifyError> {
    let mut qp = queue_pair_in(qp_type, from).expect("each_pair names states that exist");
    let before = qp.query();
    let attr = QpAttr { state: to, cur_state: from, ..good_attributes() };
    match qp.modify(&attr, mask | M::STATE, &Memory::new(0)) {
        Ok(()) => Ok(qp.state()),
        Err(error) => {
            assert_eq!(qp.query(), before, "{qp_type:?} {from:?} -> {to:?} with {mask:?} changed something");
            Err(error)
        }
    }
}

#[test]
fn only_reliable_connections_lack_sqe() {
    assert!(queue_pair_in(T::Rc, S::Sqe).is_none());
    assert!(queue_pair_in(T::XrcSend, S::Sqe).is_none());
    assert!(queue_pair_in(T::Uc, S::Sqe).is_some());
    assert!(queue_pair_in(T::Ud, S::Sqe).is_some());
}

#[test]
fn each_transition_exists_or_is_refused() {
    for (qp_type, from, to) in each_pair() {
        let expected = attributes_of(qp_type, from, to);
        assert_eq!(terrace_transport::transition_exists(qp_type, from, to), expected.is_some());
        match expected {
            Some((needed, _)) => {
                assert_eq!(required(qp_type, from, to), needed, "{qp_type:?} {from:?} -> {to:?}");
                assert_eq!(try_modify(qp_type, from, to, needed), Ok(to), "{qp_type:?} {from:?}");
            }
            None => {
                let error = ModifyError::NoTransition { qp_type, from, to };
                assert_eq!(try_modify(qp_type, from, to, M::empty()), Err(error.clone()));
                let everything = M::all().difference(M::CUR_STATE);
                assert_eq!(try_modify(qp_type, from, to, everything), Err(error));
            }
        }
    }
}

#[test]
fn each_required_attribute_is_checked() {
    for (qp_type, from, to) in each_pair() {
        let Some((needed, allowed)) = attributes_of(qp_type, from, to) else { continue };
        for missing in needed.iter() {
            for given in [needed.difference(missing), needed.union(allowed).difference(missing)] {
                let error = ModifyError::Missing { from, to, missing };
                assert_eq!(try_modify(qp_type, from, to, given), Err(error), "{qp_type:?}");
            }
        }
    }
}

#[test]
fn each_other_attribute_is_accepted_or_refused() {
    for (qp_type, from, to) in each_pair() {
        let Some((needed, allowed)) = attributes_of(qp_type, from, to) else { continue };
        assert_eq!(try_modify(qp_type, from, to, needed | allowed), Ok(to), "{qp_type:?} {from:?}");
        for (name, extra) in NAMES.into_iter().filter(|(_, bit)| !needed.contains(*bit)) {
            let result = try_modify(qp_type, from, to, needed | extra);
            if allowed.contains(extra) {
                assert_eq!(result, Ok(to), "{qp_type:?} {from:?} -> {to:?} with {name}");
            } else {
                let error = ModifyError::NotAllowed { from, to, extra };
                assert_eq!(result, Err(error), "{qp_type:?} {from:?} -> {to:?} with {name}");
            }
        }
    }
}

#[test]
fn attributes_change_without_a_state() {
    for (qp_type, from, to) in each_pair().filter(|(_, from, to)| from == to) {
        let Some((needed, allowed)) = attributes_of(qp_type, from, to) else { continue };
        let mut qp = queue_pair_in(qp_type, from).expect("it exists");
        let attr = QpAttr { state: S::Reset, cur_state: from, ..good_attributes() };
        assert_eq!(qp.modify(&attr, needed | allowed, &Memory::new(0)), Ok(()), "{qp_type:?} {from:?}");
        assert_eq!(qp.state(), from);
    }
    let mut qp = queue_pair_in(T::Rc, S::Rtr).expect("it exists");
    assert!(
        qp.modify(&good_attributes(), M::MIN_RNR_TIMER, &Memory::new(0)).is_err(),
        "RTR does not lead to RTR"
    );
}

#[test]
fn a_wrong_current_state_is_refused() {
    let mut qp = queue_pair_in(T::Rc, S::Rts).expect("it exists");
    let attr = QpAttr { state: S::Rts, cur_state: S::Sqd, ..good_attributes() };
    let error = ModifyError::WrongCurrentState { actual: S::Rts, claimed: S::Sqd };
    assert_eq!(qp.modify(&attr, M::STATE | M::CUR_STATE, &Memory::new(0)), Err(error));
}

/// Tries one value in the transition to a state.
fn try_value(to: QpState, change: impl Fn(&mut QpAttr)) -> Result<(), ModifyError> {
    let from = match to {
        S::Init => S::Reset,
        S::Rtr => S::Init,
        _ => S::Rtr,
    };
    let mut qp = queue_pair_in(T::Rc, from).expect("it exists");
    let before = qp.query();
    let mut attr = QpAttr { state: to, ..good_attributes() };
    change(&mut attr);
    let result = qp.modify(&attr, M::STATE | required(T::Rc, from, to), &Memory::new(0));
    if result.is_err() {
        assert_eq!(qp.query(), before);
    }
    result
}

#[test]
fn values_out_of_range_are_refused() {
    let field = |result: Result<(), ModifyError>| match result {
        Err(ModifyError::OutOfRange { field, .. }) => field,
        other => panic!("not refused: {other:?}"),
    };
    assert_eq!(field(try_value(S::Init, |attr| attr.port_num = 0)), "port_num");
    assert_eq!(field(try_value(S::Init, |attr| attr.port_num = 2)), "port_num");
    assert_eq!(field(try_value(S::Init, |attr| attr.pkey_index = 1)), "pkey_index");
    assert_eq!(field(try_value(S::Init, |attr| attr.access = 1 << 10)), "qp_access_flags");
    for mtu in [0, 1, 255, 300, 1500, 4096, u32::MAX] {
        assert_eq!(field(try_value(S::Rtr, |attr| attr.path_mtu = mtu)), "path_mtu", "{mtu}");
    }
    assert_eq!(field(try_value(S::Rtr, |attr| attr.path = None)), "ah_attr");
    assert_eq!(field(try_value(S::Rtr, |attr| attr.dest_qpn = 1 << 24)), "dest_qpn");
    assert_eq!(field(try_value(S::Rtr, |attr| attr.max_dest_rd_atomic = 17)), "max_dest_rd_atomic");
    assert_eq!(field(try_value(S::Rtr, |attr| attr.min_rnr_timer = 32)), "min_rnr_timer");
    assert_eq!(field(try_value(S::Rts, |attr| attr.max_rd_atomic = 17)), "max_rd_atomic");
    assert_eq!(field(try_value(S::Rts, |attr| attr.timeout = 32)), "timeout");
    assert_eq!(field(try_value(S::Rts, |attr| attr.retry_cnt = 8)), "retry_cnt");
    assert_eq!(field(try_value(S::Rts, |attr| attr.rnr_retry = 8)), "rnr_retry");
}

#[test]
fn values_at_the_limits_are_accepted() {
    for mtu in [256, 512, 1024, 2048] {
        assert_eq!(try_value(S::Rtr, |attr| attr.path_mtu = mtu), Ok(()));
    }
    assert_eq!(try_value(S::Rtr, |attr| attr.max_dest_rd_atomic = 16), Ok(()));
    assert_eq!(try_value(S::Rtr, |attr| attr.max_dest_rd_atomic = 0), Ok(()));
    assert_eq!(try_value(S::Rtr, |attr| attr.min_rnr_timer = 31), Ok(()));
    assert_eq!(try_value(S::Rts, |attr| attr.max_rd_atomic = 16), Ok(()));
    assert_eq!(try_value(S::Rts, |attr| attr.timeout = 31), Ok(()));
    assert_eq!(try_value(S::Rts, |attr| attr.retry_cnt = 7), Ok(()));
    assert_eq!(try_value(S::Rts, |attr| attr.rnr_retry = 7), Ok(()));
}

#[test]
fn a_query_returns_what_was_set() {
    for qp_type in TYPES {
        let qp = queue_pair_in(qp_type, S::Rts).expect("it exists");
        let (got, good) = (qp.query(), good_attributes());
        assert_eq!((got.state, got.cur_state, got.sq_psn), (S::Rts, S::Rts, good.sq_psn));
        match qp_type {
            T::Ud => assert_eq!(got.qkey, good.qkey),
            _ => {
                assert_eq!(
                    (got.rq_psn, got.path_mtu, got.dest_qpn),
                    (good.rq_psn, good.path_mtu, good.dest_qpn)
                );
                assert_eq!((got.access, got.path), (good.access, good.path));
            }
        }
        if qp_type == T::Rc {
            assert_eq!((got.max_rd_atomic, got.max_dest_rd_atomic), (3, 4));
            assert_eq!((got.timeout, got.retry_cnt, got.rnr_retry, got.min_rnr_timer), (14, 6, 7, 5));
        }
    }
}

#[test]
fn reset_clears_the_attributes() {
    let mut qp = queue_pair_in(T::Rc, S::Rts).expect("it exists");
    qp.modify(&QpAttr { state: S::Reset, ..QpAttr::default() }, M::STATE, &Memory::new(0))
        .expect("always possible");
    assert_eq!(qp.query(), QpAttr::default());
}
