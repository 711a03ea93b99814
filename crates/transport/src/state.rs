//! The queue pair's state machine as a table (IBTA volume 1, 10.3): the transitions, and
//! the attributes that each requires and allows, by kind of queue pair.
//!
//! ```text
//!             +-------+    +------+    +-----+    +-----+ -------> +-----+
//!  create --> | RESET | -> | INIT | -> | RTR | -> | RTS | <------- | SQD |
//!             +-------+    +------+    +-----+    +-----+          +-----+
//!                 ^                                 |  ^
//!                 |    any state -> RESET           v  |  send error on UC, UD
//!                 |    any but RESET -> ERR       +-----+
//!              +-----+                            | SQE |
//!              | ERR |                            +-----+
//!              +-----+
//! ```

use crate::types::{
    ModifyError, QpAttr, QpAttrMask as M, QpConfig, QpState, QpState as S, QpType, RETRY_CNT_INFINITE,
};

struct Transition {
    from: QpState,
    to: QpState,
    /// Required attributes, and further ones that may be given, by kind of queue pair.
    required: ByType,
    optional: ByType,
}

/// A value each for RC, UC, UD and the two ends of XRC.
type ByType = [M; 5];

const NONE: ByType = [M::empty(); 5];
const PATH: M = M::AV.union(M::PATH_MTU).union(M::DEST_QPN).union(M::RQ_PSN);
/// Attributes of an end that answers READs and sends RNR NAKs.
const RESPONDER: M = M::MAX_DEST_RD_ATOMIC.union(M::MIN_RNR_TIMER);
/// Attributes of an end that sends requests.
const REQUESTER: M = M::TIMEOUT.union(M::RETRY_CNT).union(M::RNR_RETRY).union(M::MAX_QP_RD_ATOMIC);
const ALT: M = M::ALT_PATH.union(M::PATH_MIG_STATE);
const IDENTITY: M = M::PKEY_INDEX.union(M::PORT);
const CONNECTION: M = IDENTITY.union(M::ACCESS_FLAGS);
const CONNECTED_OPTIONS: M = M::CUR_STATE.union(M::ACCESS_FLAGS).union(ALT);
const CONNECTING_OPTIONS: M = M::ALT_PATH.union(M::ACCESS_FLAGS).union(M::PKEY_INDEX);
const DRAINED_OPTIONS: M = M::AV.union(M::ACCESS_FLAGS).union(M::PKEY_INDEX).union(ALT);
const RUNNING_OPTIONS: ByType = [
    CONNECTED_OPTIONS.union(M::MIN_RNR_TIMER),
    CONNECTED_OPTIONS,
    M::CUR_STATE.union(M::QKEY),
    CONNECTED_OPTIONS,
    CONNECTED_OPTIONS.union(M::MIN_RNR_TIMER),
];
const INIT_ATTRIBUTES: ByType = [CONNECTION, CONNECTION, IDENTITY.union(M::QKEY), CONNECTION, CONNECTION];

const TRANSITIONS: &[Transition] = &[
    Transition { from: S::Reset, to: S::Init, required: INIT_ATTRIBUTES, optional: NONE },
    Transition { from: S::Init, to: S::Init, required: NONE, optional: INIT_ATTRIBUTES },
    Transition {
        from: S::Init,
        to: S::Rtr,
        required: [PATH.union(RESPONDER), PATH, M::empty(), PATH, PATH.union(RESPONDER)],
        optional: [
            CONNECTING_OPTIONS,
            CONNECTING_OPTIONS,
            M::PKEY_INDEX.union(M::QKEY),
            CONNECTING_OPTIONS,
            CONNECTING_OPTIONS,
        ],
    },
    Transition {
        from: S::Rtr,
        to: S::Rts,
        required: [
            M::SQ_PSN.union(REQUESTER),
            M::SQ_PSN,
            M::SQ_PSN,
            M::SQ_PSN.union(REQUESTER),
            M::SQ_PSN.union(M::TIMEOUT),
        ],
        optional: RUNNING_OPTIONS,
    },
    Transition { from: S::Rts, to: S::Rts, required: NONE, optional: RUNNING_OPTIONS },
    Transition { from: S::Rts, to: S::Sqd, required: NONE, optional: [M::EN_SQD_ASYNC_NOTIFY; 5] },
    Transition { from: S::Sqd, to: S::Rts, required: NONE, optional: RUNNING_OPTIONS },
    Transition {
        from: S::Sqd,
        to: S::Sqd,
        required: NONE,
        optional: [
            DRAINED_OPTIONS.union(M::PORT).union(REQUESTER).union(RESPONDER),
            DRAINED_OPTIONS,
            M::PKEY_INDEX.union(M::QKEY),
            DRAINED_OPTIONS.union(M::PORT).union(REQUESTER),
            DRAINED_OPTIONS.union(M::PORT).union(M::TIMEOUT).union(RESPONDER),
        ],
    },
    Transition {
        from: S::Sqe,
        to: S::Rts,
        required: NONE,
        optional: [
            M::empty(),
            M::CUR_STATE.union(M::ACCESS_FLAGS),
            M::CUR_STATE.union(M::QKEY),
            M::empty(),
            M::empty(),
        ],
    },
];

fn column(qp_type: QpType) -> usize {
    match qp_type {
        QpType::Rc => 0,
        QpType::Uc => 1,
        QpType::Ud => 2,
        QpType::XrcSend => 3,
        QpType::XrcRecv => 4,
    }
}

/// The attributes that a transition requires and those it allows besides; `None` where there is no transition.
/// Every state leads to RESET, and all but RESET to ERR, without attributes. RC and XRC have no SQE.
fn attributes(qp_type: QpType, from: QpState, to: QpState) -> Option<(M, M)> {
    if qp_type.is_reliable() && (from == S::Sqe || to == S::Sqe) {
        return None;
    }
    if to == S::Reset || (to == S::Err && from != S::Reset) {
        return Some((M::empty(), M::empty()));
    }
    let column = column(qp_type);
    TRANSITIONS
        .iter()
        .find(|transition| transition.from == from && transition.to == to)
        .map(|transition| (transition.required[column], transition.optional[column]))
}

/// Whether `modify_qp` has this transition for this kind of queue pair.
pub fn transition_exists(qp_type: QpType, from: QpState, to: QpState) -> bool {
    attributes(qp_type, from, to).is_some()
}

/// The attributes that the transition requires, besides the state itself; `None` where there is no transition.
pub fn required_attributes(qp_type: QpType, from: QpState, to: QpState) -> Option<M> {
    attributes(qp_type, from, to).map(|(required, _)| required)
}

/// Checks a `modify_qp` and returns its target state. Changes nothing.
pub(crate) fn check(
    config: &QpConfig,
    actual: QpState,
    attr: &QpAttr,
    mask: M,
) -> Result<QpState, ModifyError> {
    if mask.contains(M::CUR_STATE) && attr.cur_state != actual {
        return Err(ModifyError::WrongCurrentState { actual, claimed: attr.cur_state });
    }
    let to = if mask.contains(M::STATE) { attr.state } else { actual };
    let (required, optional) = attributes(config.qp_type, actual, to).ok_or(ModifyError::NoTransition {
        qp_type: config.qp_type,
        from: actual,
        to,
    })?;
    let given = mask.difference(M::STATE);
    let missing = required.difference(given);
    if !missing.is_empty() {
        return Err(ModifyError::Missing { from: actual, to, missing });
    }
    let extra = given.difference(required.union(optional));
    if !extra.is_empty() {
        return Err(ModifyError::NotAllowed { from: actual, to, extra });
    }
    check_values(config, attr, mask)?;
    Ok(to)
}

/// Defined `ibv_access_flags`, and the range of those that a device may ignore (`IBV_ACCESS_OPTIONAL_RANGE`).
const ACCESS_FLAGS_KNOWN: u32 = 0x3ff | 0x3ff0_0000;

fn check_values(config: &QpConfig, attr: &QpAttr, mask: M) -> Result<(), ModifyError> {
    let limit = u64::from(config.rd_atomic_limit);
    let rules: [(M, &'static str, u64, bool, &'static str); 11] = [
        (
            M::ACCESS_FLAGS,
            "qp_access_flags",
            attr.access.into(),
            attr.access & !ACCESS_FLAGS_KNOWN == 0,
            "flags of ibv_access_flags",
        ),
        (M::PORT, "port_num", attr.port_num.into(), attr.port_num == 1, "the device has one port, 1"),
        (M::PKEY_INDEX, "pkey_index", attr.pkey_index.into(), attr.pkey_index == 0, "the only index is 0"),
        (M::DEST_QPN, "dest_qpn", attr.dest_qpn.into(), attr.dest_qpn >> 24 == 0, "24 bits"),
        (M::TIMEOUT, "timeout", attr.timeout.into(), attr.timeout < 32, "0 to 31"),
        (
            M::RETRY_CNT,
            "retry_cnt",
            attr.retry_cnt.into(),
            attr.retry_cnt < 8 || attr.retry_cnt == RETRY_CNT_INFINITE,
            "0 to 7",
        ),
        (M::RNR_RETRY, "rnr_retry", attr.rnr_retry.into(), attr.rnr_retry < 8, "0 to 7"),
        (M::MIN_RNR_TIMER, "min_rnr_timer", attr.min_rnr_timer.into(), attr.min_rnr_timer < 32, "0 to 31"),
        (
            M::MAX_QP_RD_ATOMIC,
            "max_rd_atomic",
            attr.max_rd_atomic.into(),
            u64::from(attr.max_rd_atomic) <= limit,
            "at most the device's max_qp_init_rd_atom",
        ),
        (
            M::MAX_DEST_RD_ATOMIC,
            "max_dest_rd_atomic",
            attr.max_dest_rd_atomic.into(),
            u64::from(attr.max_dest_rd_atomic) <= limit,
            "at most the device's max_qp_rd_atom",
        ),
        (
            M::PATH_MTU,
            "path_mtu",
            attr.path_mtu.into(),
            matches!(attr.path_mtu, 256 | 512 | 1024 | 2048 | 4096) && attr.path_mtu <= config.mtu_limit,
            "256, 512, 1024, 2048 or 4096 bytes, and at most the port's active MTU",
        ),
    ];
    for (bit, field, value, good, allowed) in rules {
        if mask.contains(bit) && !good {
            return Err(ModifyError::OutOfRange { field, value, allowed });
        }
    }
    if mask.contains(M::AV) && attr.path.is_none() {
        let allowed = "the address vector must name a peer by GID";
        return Err(ModifyError::OutOfRange { field: "ah_attr", value: 0, allowed });
    }
    Ok(())
}

/// Copies the attributes in the mask.
pub(crate) fn apply(own: &mut QpAttr, attr: &QpAttr, mask: M) {
    macro_rules! take {
        ($($bit:ident => $field:ident),* $(,)?) => { $(if mask.contains(M::$bit) { own.$field = attr.$field; })* };
    }
    take! {
        ACCESS_FLAGS => access, PKEY_INDEX => pkey_index, PORT => port_num, QKEY => qkey, AV => path,
        PATH_MTU => path_mtu, TIMEOUT => timeout, RETRY_CNT => retry_cnt, RNR_RETRY => rnr_retry,
        RQ_PSN => rq_psn, MAX_QP_RD_ATOMIC => max_rd_atomic, MIN_RNR_TIMER => min_rnr_timer, SQ_PSN => sq_psn,
        MAX_DEST_RD_ATOMIC => max_dest_rd_atomic, DEST_QPN => dest_qpn,
        EN_SQD_ASYNC_NOTIFY => en_sqd_async_notify, RATE_LIMIT => rate_limit,
    }
}
