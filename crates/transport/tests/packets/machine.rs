//! Plays a script: one queue pair, its host, the time, and the output not expected yet.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;

use terrace_transport::{
    AckPolicy, Qp, QpAttr, QpAttrMask, QpCap, QpConfig, QpState, QpType, RemoteError, StagingBudget, Time,
    Transmit, Wc, WcFlags, WcStatus,
};
use terrace_wire::{Packet, Path};

use crate::packet::{self, Described};
use crate::posts;
use crate::support::host::{Event, Memory, pattern};
use crate::support::sink::Collector;
use crate::support::{bring_up, meta_between, path_to};
use crate::syntax::{Line, duration_ns};

const MEMORY_LEN: usize = 1 << 20;
const OWN_QPN: u32 = 0x11;
const PEER_QPN: u32 = 0x22;
/// More timers than this in one wait means that they make no progress.
const TIMERS_MAX: usize = 100_000;

pub struct Machine {
    qp: Qp,
    host: Memory,
    now: Time,
    defers_acks: bool,
    room: Option<usize>,
    own: IpAddr,
    peer: IpAddr,
    attr: QpAttr,
    packets: VecDeque<Described>,
    events: VecDeque<Event>,
    staging_bytes: u64,
}

impl Machine {
    /// Makes the queue pair that a script's `qp` line describes.
    pub fn new(mut line: Line) -> Result<Machine, String> {
        let qp_type = match line.word("the kind of queue pair")?.as_str() {
            "rc" => QpType::Rc,
            "uc" => QpType::Uc,
            "ud" => QpType::Ud,
            "xrc-send" => QpType::XrcSend,
            "xrc-recv" => QpType::XrcRecv,
            other => return Err(format!("there is no queue pair of kind {other:?}")),
        };
        let (own, peer): (IpAddr, IpAddr) = match line.flag("ipv6") {
            true => ([0xfd00, 0, 0, 0, 0, 0, 0, 1].into(), [0xfd00, 0, 0, 0, 0, 0, 0, 2].into()),
            false => ([10, 0, 0, 1].into(), [10, 0, 0, 2].into()),
        };
        let config = QpConfig {
            qpn: OWN_QPN,
            qp_type,
            cap: QpCap {
                max_send_wr: line.small("max_send", 64)?,
                max_recv_wr: line.small("max_recv", 64)?,
                max_send_sge: 4,
                max_recv_sge: 4,
                max_inline_data: line.small("max_inline", 64)?,
            },
            sq_sig_all: line.flag("signal_all"),
            has_srq: line.flag("srq"),
            window_bytes: line.small("window", 1 << 20)?,
            rd_atomic_limit: 16,
            mtu_limit: line.small("mtu_limit", 4096)?,
        };
        let state = posts::state_named(&line.text("state").unwrap_or_else(|| "rts".to_owned()))?;
        let mut attr = QpAttr {
            path_mtu: 256,
            access: 0x30e,
            path: Some(path_to(peer)),
            dest_qpn: PEER_QPN,
            port_num: 1,
            max_rd_atomic: 4,
            max_dest_rd_atomic: 4,
            min_rnr_timer: 12,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            ..QpAttr::default()
        };
        posts::attributes(&mut line, &mut attr)?;
        line.finish()?;
        let mut qp = Qp::new(config);
        bring_up(&mut qp, &attr, state);
        let mut machine = Machine {
            qp,
            host: Memory::new(MEMORY_LEN),
            now: Time(1_000_000_000),
            defers_acks: false,
            room: None,
            own,
            peer,
            attr,
            packets: VecDeque::new(),
            events: VecDeque::new(),
            staging_bytes: StagingBudget::default().free_bytes(),
        };
        machine.run()?;
        Ok(machine)
    }

    /// Plays one line.
    pub fn play(&mut self, mut line: Line) -> Result<(), String> {
        let verb = line.word("the verb")?;
        match verb.as_str() {
            "<" => return self.expect_packets(line),
            "done" | "recv" => self.expect_completion(&verb, &mut line)?,
            "event" => self.expect_event(&line.word("the event")?)?,
            "did" => return self.expect_deed(line),
            "memory" => self.expect_memory(&mut line)?,
            "records" => self.expect_records(&mut line)?,
            "staged" => self.expect_staged(&mut line)?,
            "timer" => self.expect_timer(&line.word("the time")?)?,
            "state" => self.expect_state(&line.word("the state")?)?,
            "query" => self.expect_attributes(&mut line)?,
            "counter" => self.expect_counter(&mut line)?,
            "silence" => self.nothing_left()?,
            _ => {
                self.nothing_left()?;
                return self.act(&verb, line);
            }
        }
        line.finish()
    }

    /// Plays an action of the program, the peer or the clock.
    fn act(&mut self, verb: &str, mut line: Line) -> Result<(), String> {
        match verb {
            ">" | ">>" => return self.inject(line, verb == ">"),
            "post" => self.post(&mut line)?,
            "modify" => self.modify(&mut line)?,
            "wait" => self.wait(&line.word("the time")?)?,
            "region" => self.change_region(&mut line)?,
            "absent" | "present" => {
                let span = line.word("the addresses")?;
                let (addr, len) = line.span(&span)?;
                self.host.absent.borrow_mut().retain(|range| range.start < addr || range.end > addr + len);
                if verb == "absent" {
                    self.host.absent.borrow_mut().push(addr..addr + len);
                }
            }
            "faulting" => self.host.faulting.set(true),
            "appends" => {
                line.word("later")?;
                self.host.defers_appends.set(true);
            }
            "staging" => {
                let bytes = line.word("the number of bytes")?;
                self.staging_bytes = line.evaluate(&bytes)?;
                *self.host.staging.borrow_mut() = Arc::new(StagingBudget::new(self.staging_bytes));
            }
            "srq" => {
                let (number, what) = (line.word("the queue's number")?, line.optional_word());
                let number = line.evaluate(&number)? as u32;
                match what.as_deref() {
                    None => drop(self.host.srqs.borrow_mut().insert(number, VecDeque::new())),
                    Some("gone") => drop(self.host.srqs.borrow_mut().remove(&number)),
                    Some(other) => return Err(format!("srq {other:?}?")),
                }
            }
            "slots" => {
                let word = line.word("the number of accesses")?;
                if word == "stolen" {
                    self.host.slots.steal();
                    return line.finish();
                }
                let free = if word == "any" { None } else { Some(line.evaluate(&word)? as usize) };
                self.host.slots.set(free);
                self.wake()?;
            }
            "complete" => self.complete(&mut line)?,
            "put" => {
                let addr = line.word("the address")?;
                let (addr, data) = (line.evaluate(&addr)?, line.word("the data")?);
                self.host.write(addr, &line.data(&data)?);
            }
            "acks" => {
                self.defers_acks = match line.word("hold or now")?.as_str() {
                    "hold" => true,
                    "now" => false,
                    other => return Err(format!("acks {other:?}?")),
                };
                self.run()?;
            }
            "pause" => {
                let pause_ns = duration_ns(&line.word("the time")?)?;
                self.host.pause_ns.set((pause_ns > 0).then_some(pause_ns));
            }
            "room" => {
                let word = line.word("the number of packets")?;
                self.room = if word == "any" { None } else { Some(line.evaluate(&word)? as usize) };
                self.run()?;
            }
            _ => return Err(format!("there is no verb {verb:?}")),
        }
        line.finish()
    }

    /// Runs the queue pair until it is idle at this time.
    fn run(&mut self) -> Result<(), String> {
        loop {
            self.take_events();
            if self.defers_acks && self.qp.wants_only_to_acknowledge() {
                return Ok(());
            }
            let mut sink = Collector { room: self.room, ..Collector::default() };
            let stopped = self.qp.poll_transmit(|| self.now, &self.host, &mut sink, AckPolicy::Now);
            self.room = sink.room;
            let sent_any = !sink.packets.is_empty();
            for (path, bytes) in sink.packets {
                self.take_packet(path, &bytes)?;
            }
            self.take_events();
            if stopped == Transmit::SinkFull {
                return Ok(());
            }
            if !self.host.slots.take_wakeups().is_empty() {
                self.qp.wake();
                continue;
            }
            let wants_transmit = self.qp.wants_transmit();
            if wants_transmit && !sent_any {
                return Err("wants_transmit() although it sends nothing".to_owned());
            }
            if !wants_transmit {
                return Ok(());
            }
        }
    }

    fn take_events(&mut self) {
        while let Some(event) = self.host.poll_event() {
            self.events.push_back(event);
        }
    }

    /// Ends an access to absent memory: the oldest, the latest, or with an error.
    fn complete(&mut self, line: &mut Line) -> Result<(), String> {
        let count = self.host.under_way.borrow().len();
        let (index, outcome) = match line.optional_word().as_deref() {
            None => (0, Ok(())),
            Some("last") => (count.saturating_sub(1), Ok(())),
            Some("access") => (0, Err(RemoteError::Access)),
            Some("operation") => (0, Err(RemoteError::Operation)),
            Some(other) => return Err(format!("complete {other:?}?")),
        };
        if !self.host.complete(index, outcome) {
            return Err("no access to absent memory is in progress".to_owned());
        }
        self.wake()
    }

    fn wake(&mut self) -> Result<(), String> {
        self.qp.wake();
        self.run()
    }

    fn take_packet(&mut self, path: Path, bytes: &[u8]) -> Result<(), String> {
        let packet = packet::check_well_formed(bytes)?;
        let mtu = match self.qp.config().qp_type {
            QpType::Ud => self.qp.config().mtu_limit,
            _ => self.qp.query().path_mtu,
        };
        if packet.payload.len() > mtu as usize {
            return Err(format!("payload of {} bytes is longer than the MTU", packet.payload.len()));
        }
        if path != path_to(self.peer) {
            return Err(format!("a packet for {:?}", path.remote));
        }
        self.packets.push_back(Described::of(&packet));
        Ok(())
    }

    fn inject(&mut self, mut line: Line, then_run: bool) -> Result<(), String> {
        let source = match line.text("from") {
            Some(addr) => addr.parse().map_err(|_| format!("{addr:?} is not an address"))?,
            None => self.peer,
        };
        let ecn = line.small("ecn", 0)?;
        let meta = meta_between(source, self.own, ecn);
        let qp_type = match line.flag("foreign_service") {
            true => QpType::Ud,
            false => self.qp.config().qp_type,
        };
        for described in packet::parse(line)? {
            let bytes = described.to_bytes(qp_type)?;
            let packet = Packet::parse(&bytes).map_err(|error| error.to_string())?;
            self.qp.handle_packet(|| self.now, &meta, &packet, None, &self.host);
            if then_run {
                self.run()?;
            }
        }
        Ok(())
    }

    fn post(&mut self, line: &mut Line) -> Result<(), String> {
        let kind = line.word("what to post")?;
        let refused = line.text("refused");
        let result = match kind.as_str() {
            "recv" => self.qp.post_recv(posts::receive_request(line)?, &self.host),
            "xrc-shared" => {
                let srqn = line.small("srqn", 0)?;
                let receive = posts::receive_request(line)?;
                self.host.srqs.borrow_mut().get_mut(&srqn).ok_or("no such queue")?.push_back(receive);
                Ok(())
            }
            "shared" => {
                self.host.shared_receives.borrow_mut().push_back(posts::receive_request(line)?);
                Ok(())
            }
            _ => {
                let mut wr = posts::send_request(&kind, line, self.peer)?;
                self.qp.post_send(|| self.now, &mut wr, &self.host, &mut ())
            }
        };
        let batched = line.flag("batched");
        let got = result.err().map(|error| format!("{error:?}"));
        if got != refused {
            return Err(format!("refused: expected {refused:?}, got {got:?}"));
        }
        if batched { Ok(()) } else { self.run() }
    }

    fn modify(&mut self, line: &mut Line) -> Result<(), String> {
        let to = posts::state_named(&line.word("the state")?)?;
        let mut attr = QpAttr { state: to, en_sqd_async_notify: false, ..self.attr };
        let mut mask = QpAttrMask::STATE | posts::attributes(line, &mut attr)?;
        let (qp_type, from) = (self.qp.config().qp_type, self.qp.state());
        mask |= terrace_transport::required_attributes(qp_type, from, to).unwrap_or(QpAttrMask::empty());
        let refused = line.flag("refused");
        let result = self.qp.modify(&attr, mask, &self.host);
        if result.is_err() != refused {
            return Err(format!("modify: {result:?}"));
        }
        if to == QpState::Reset {
            // RESET discards outstanding work, and its events with it.
            self.events.clear();
            self.host.events.borrow_mut().clear();
        }
        self.run()
    }

    /// Advances the time; timers expire when due. `timer` means until the next one.
    fn wait(&mut self, text: &str) -> Result<(), String> {
        let end = match text {
            "timer" => self.qp.deadline().ok_or("no timer runs")?,
            _ => self.now.after_ns(duration_ns(text)?),
        };
        for _ in 0..TIMERS_MAX {
            let Some(due) = self.qp.deadline().filter(|due| *due <= end) else {
                self.now = end;
                self.qp.handle_timeout(self.now, &self.host);
                return self.run();
            };
            self.now = self.now.max(due);
            self.qp.handle_timeout(self.now, &self.host);
            self.run()?;
        }
        Err("timers go off without end".to_owned())
    }

    fn change_region(&mut self, line: &mut Line) -> Result<(), String> {
        let key = line.word("the key")?;
        let (key, what) = (line.evaluate(&key)? as u32, line.word("what to do with the region")?);
        match what.as_str() {
            "gone" => drop(self.host.regions.borrow_mut().remove(&key)),
            "broken" => {
                self.host.regions.borrow_mut().get_mut(&key).ok_or("no such region")?.broken = true;
            }
            span => {
                let (addr, len) = line.span(span)?;
                self.host.add_region(key, addr, len, &line.word("the rights")?);
                if let Some(srqn) = line.number("srqn")? {
                    self.host.behind.borrow_mut().insert(key, srqn as u32);
                }
            }
        }
        Ok(())
    }

    /// Fails if there is output that the script has not expected.
    pub fn nothing_left(&self) -> Result<(), String> {
        let packet = self.packets.front().map(|packet| format!("< {packet}"));
        let event = self.events.front().map(describe_event);
        match packet.or(event).or(self.host.log.borrow().front().map(|deed| format!("did {deed}"))) {
            Some(what) => Err(format!("unexpected: {what}")),
            None => Ok(()),
        }
    }

    fn expect_packets(&mut self, line: Line) -> Result<(), String> {
        for expected in packet::parse(line)? {
            let Some(seen) = self.packets.pop_front() else {
                return Err(format!("expected: < {expected}\n     got: nothing"));
            };
            let differences = expected.differences(&seen);
            if !differences.is_empty() {
                let list = differences.join("\n          ");
                return Err(format!("expected: < {expected}\n     got: < {seen}\n          {list}"));
            }
        }
        Ok(())
    }

    fn expect_completion(&mut self, verb: &str, line: &mut Line) -> Result<(), String> {
        let event = self.events.pop_front();
        let wc = match (verb, &event) {
            ("done", Some(Event::SendComplete(wc))) | ("recv", Some(Event::RecvComplete(wc))) => *wc,
            _ => return Err(format!("got: {}", event.as_ref().map_or("nothing".to_owned(), describe_event))),
        };
        let (id, status) = (line.word("the id")?, line.word("the status")?);
        let mut same =
            line.evaluate(&id)? == wc.wr_id && status == status_name(wc.status) && wc.qpn == OWN_QPN;
        let solicited = line.flag("solicited");
        if verb == "recv" && wc.status == WcStatus::Success {
            same &= solicited == wc.solicited;
        }
        same &= line.optional_word().is_none_or(|op| op == format!("{:?}", wc.opcode));
        for (key, got) in [
            ("len", wc.byte_len),
            ("src", wc.src_qp),
            ("sl", u32::from(wc.sl)),
            ("vendor", wc.vendor_err),
            ("srqn", wc.srqn),
        ] {
            same &= line.number(key)?.is_none_or(|expected| expected == u64::from(got));
        }
        let imm = line.number("imm")?;
        let inv = line.number("inv")?;
        same &= imm.is_some() == wc.flags.contains(WcFlags::WITH_IMM);
        same &= inv.is_some() == wc.flags.contains(WcFlags::WITH_INV);
        same &= imm.is_none_or(|imm| imm == u64::from(u32::from_be(wc.imm)));
        same &= inv.is_none_or(|inv| inv == u64::from(wc.imm));
        if same {
            Ok(())
        } else {
            Err(format!("got: {}", event.as_ref().map_or(String::new(), describe_event)))
        }
    }

    fn expect_event(&mut self, name: &str) -> Result<(), String> {
        match self.events.pop_front() {
            Some(Event::Raised(event)) if format!("{event:?}") == name => Ok(()),
            event => Err(format!("got: {}", event.as_ref().map_or("nothing".to_owned(), describe_event))),
        }
    }

    fn expect_deed(&mut self, mut line: Line) -> Result<(), String> {
        let mut expected = line.word("the deed")?;
        for key in ["key", "va", "len", "placement", "selectivity"] {
            if let Some(value) = line.text(key) {
                expected += &format!(" {key}={value}");
            }
        }
        match self.host.log.borrow_mut().pop_front() {
            Some(deed) if deed == expected => line.finish(),
            deed => Err(format!("expected: did {expected}\n     got: {deed:?}")),
        }
    }

    fn expect_memory(&mut self, line: &mut Line) -> Result<(), String> {
        let (place, what) = (line.word("the place")?, line.word("the content")?);
        let (addr, expected) = if what == "untouched" {
            let (addr, len) = line.span(&place)?;
            (addr, (addr..addr + len).map(pattern).collect())
        } else {
            (line.evaluate(&place)?, line.data(&what)?)
        };
        let got = self.host.read(addr, expected.len());
        match (0..got.len()).find(|at| got[*at] != expected[*at]) {
            None => Ok(()),
            Some(at) => Err(format!(
                "byte {at} at {:#x} should be {:#04x}, is {:#04x}",
                addr + at as u64,
                expected[at],
                got[at]
            )),
        }
    }

    /// All that peers have appended to a region.
    fn expect_records(&mut self, line: &mut Line) -> Result<(), String> {
        let (key, data) = (line.word("the key")?, line.word("the content")?);
        let (key, expected) = (line.evaluate(&key)? as u32, line.data(&data)?);
        let records = self.host.records.borrow();
        let got = records.get(&key).map_or(&[][..], |bytes| bytes);
        match got == expected {
            true => Ok(()),
            false => Err(format!("{} bytes were appended that differ", got.len())),
        }
    }

    /// Bytes reserved for incomplete records.
    fn expect_staged(&mut self, line: &mut Line) -> Result<(), String> {
        let bytes = line.word("the number of bytes")?;
        let (expected, got) =
            (line.evaluate(&bytes)?, self.staging_bytes - self.host.staging.borrow().free_bytes());
        if got == expected { Ok(()) } else { Err(format!("got: {got}")) }
    }

    fn expect_timer(&mut self, text: &str) -> Result<(), String> {
        let expected = if text == "none" { None } else { Some(self.now.after_ns(duration_ns(text)?)) };
        let got = self.qp.deadline();
        if got == expected {
            return Ok(());
        }
        let rest = got.map(|due| i128::from(due.0) - i128::from(self.now.0));
        Err(format!("got: {}", rest.map_or("none".to_owned(), |ns| format!("{ns} ns"))))
    }

    fn expect_state(&mut self, name: &str) -> Result<(), String> {
        let got = self.qp.state();
        if got == posts::state_named(name)? { Ok(()) } else { Err(format!("got: {got:?}")) }
    }

    fn expect_attributes(&mut self, line: &mut Line) -> Result<(), String> {
        let got = self.qp.query();
        if line.flag("draining") != got.sq_draining {
            return Err(format!("got: draining = {}", got.sq_draining));
        }
        for (key, value) in [
            ("sq_psn", u64::from(got.sq_psn)),
            ("rq_psn", got.rq_psn.into()),
            ("mtu", got.path_mtu.into()),
            ("in_flight", self.qp.unacknowledged_packets().into()),
            ("queued", self.qp.queued_requests() as u64),
        ] {
            if let Some(expected) = line.number(key)?
                && expected != value
            {
                return Err(format!("got: {key} = {value:#x}"));
            }
        }
        Ok(())
    }

    fn expect_counter(&mut self, line: &mut Line) -> Result<(), String> {
        let counters = self.qp.counters();
        for (key, value) in [
            ("retransmits", counters.retransmits),
            ("timeouts", counters.timeouts),
            ("rnr_naks_sent", counters.rnr_naks_sent),
            ("rnr_naks_received", counters.rnr_naks_received),
            ("sequence_naks_sent", counters.sequence_naks_sent),
            ("sequence_naks_received", counters.sequence_naks_received),
            ("error_naks_sent", counters.error_naks_sent),
            ("error_naks_received", counters.error_naks_received),
            ("duplicates", counters.duplicates),
            ("dropped", counters.dropped),
            ("fetches", counters.fetches),
            ("puts", counters.puts),
            ("cnps_received", counters.cnps_received),
            ("cnps_sent", counters.cnps_sent),
        ] {
            if let Some(expected) = line.number(key)?
                && expected != value
            {
                return Err(format!("got: {key} = {value}"));
            }
        }
        Ok(())
    }
}

fn status_name(status: WcStatus) -> String {
    if status == WcStatus::Success { "ok".to_owned() } else { format!("{status:?}") }
}

fn describe_event(event: &Event) -> String {
    match event {
        Event::SendComplete(wc) => format!("done {}", describe_completion(wc)),
        Event::RecvComplete(wc) => format!("recv {}", describe_completion(wc)),
        Event::Raised(event) => format!("event {event:?}"),
    }
}

fn describe_completion(wc: &Wc) -> String {
    let mut text = format!("{} {} {:?} len={}", wc.wr_id, status_name(wc.status), wc.opcode, wc.byte_len);
    if wc.flags.contains(WcFlags::WITH_IMM) {
        text += &format!(" imm={:#x}", u32::from_be(wc.imm));
    }
    if wc.flags.contains(WcFlags::WITH_INV) {
        text += &format!(" inv={:#x}", wc.imm);
    }
    if wc.solicited {
        text += " solicited";
    }
    text + &format!(" src={:#x} sl={} vendor={:#x}", wc.src_qp, wc.sl, wc.vendor_err)
}
