//! Plays the packet scripts in `tests/packets/*.pkt` at the root of the repository: one short script for each rule of
//! the protocol, named after the rule. Each script is a test of its own; any other file in that folder fails.
//!
//! A script drives one queue pair, and plays its peer, its memory and the clock. It is read line by line; `#` begins a
//! comment. The script must expect all output, in order, before its next action. Unexpected output fails the script,
//! so silence is tested everywhere.
//!
//! ```text
//! for mtu 256 4096                play the script once for each value; numbers may then say `mtu`
//! qp rc mtu=256 ...               rc, uc, ud, xrc-send or xrc-recv; attributes not given have the defaults below
//!
//! region 1 0x1000:0x4000 lrwagp   memory with this lkey and rkey: address, length, rights (tests/support/host.rs)
//! region 2 0x1000:64 r srqn=0x33  ... that only requests for this shared receive queue of XRC can reach
//! region 1 gone                   ... is deregistered;  `broken`: its flushes fail
//! srq 0x33                        a shared receive queue of XRC, by its number;  `srq 0x33 gone`
//! put 0x1000 u64:5                the program writes to its memory
//! absent 0x1000:0x400             this part of the memory is absent;  `present 0x1000:0x400`: all of it is there again
//! faulting                        requests for absent memory get an RNR NAK
//! slots 2                         two more accesses to absent memory may be in progress or hold unsent data;
//!                                 `slots any`;  `slots stolen`: another queue pair takes the next slot that is freed
//! appends later                   APPENDs end by `complete` from now on
//! staging 4096                    so many bytes of incomplete records may be kept
//! complete                        the oldest access ends;  `complete last`: the latest;  `complete access`,
//!                                 `complete operation`: the oldest, with an error
//!
//! post send id=1 mem=0x1000:300   send, write, read, cas, faa, atomic-write, flush, append, invalidate, bind, recv,
//!                                 shared (a receive of the shared queue) or xrc-shared (a receive of the queue
//!                                 srqn=); mem= lists addresses and lengths, key= is their lkey (1); inline=DATA;
//!                                 va= rkey= imm= inv= swap= compare= add= len=; fence, solicited, before, after, unsignaled, commit;
//!                                 refused=REASON; to_qpn= qkey= for ud; srqn= for xrc;
//!                                 batched: the request leaves with the next line that acts
//! modify sqd notify               required attributes are added; `refused` when it must fail
//!
//! > ACK psn=100 msn=1             the peer sends; from=ADDRESS and ecn=3 set the IP source and ECN
//! >> ACK psn=100 msn=1            ... and the queue pair handles it, but sends nothing yet
//! < SEND_ONLY psn=100 ack         the queue pair has sent this. Name, flags (ack, se, becn), payload and the given
//!                                 fields must agree. psn=1..9 stands for nine packets
//! wait 67ms                       time passes, and timers expire; `wait timer`: until the next one
//! acks hold                       an acknowledgement that is all there is to send is deferred from now on;
//!                                 `acks now`
//! pause 10us                      an unreliable service pauses that long after each packet;  `pause 0ns`
//! room 2                          the TX sink takes two more packets;  `room any`
//!
//! done 1 ok RdmaRead len=300      completion of a send;  `recv 7 ok imm=5 solicited` of a receive
//! event SqDrained                 an asynchronous event
//! did flush key=0x1 ...           flush, invalidate or bind reached the memory; append or commit-append: a record has
//!                                 its place; fetch, put, put-atomic or flush-later: an access to absent memory began
//! memory 0x1000 @0x9000:300       content;  `memory 0x1000:300 untouched`
//! records 1 @0x9000:300           all that was appended to region 1;  `staged 600`: bytes kept of incomplete records
//! timer 640us                     when the next timer expires;  `timer none`
//! state err;  query sq_psn=1 rq_psn=2 in_flight=3 queued=4 draining;  counter retransmits=1
//! silence                         there was no output: for the reader, since every line that acts checks it too
//! ```
//!
//! Packets have the names of the opcode table without the service, and `ACK`, `RNR timer=`, and `NAK sequence`,
//! `invalid`, `access` or `operation`. Payload is `data=DATA`, or `payload=LENGTH` when its bytes do not matter.
//! DATA is `@ADDRESS:LENGTH` (that memory's initial content; adjacent bytes differ), `u64:5`, `x:0102ff`,
//! `LENGTH*BYTE` or `empty`. Numbers are decimal or 0x, with `+`, `-` and `*`.
//!
//! Defaults: mtu=256 sq_psn=0 rq_psn=0 rd=4 dest_rd=4 timeout=14 retry=7 rnr_retry=7 rnr_timer=12 access=rwagp
//! window=1048576 state=rts; signal_all, srq and ipv6 are off. The peer is 10.0.0.2, queue pair 0x22.

#[path = "packets/machine.rs"]
mod machine;
#[path = "packets/packet.rs"]
mod packet;
#[path = "packets/posts.rs"]
mod posts;
mod support;
#[path = "packets/syntax.rs"]
mod syntax;

use std::fs;
use std::path::{Path, PathBuf};

use libtest_mimic::{Arguments, Failed, Trial};

use machine::Machine;
use syntax::{Line, Variables};

/// Lines of a script that a failure shows before the failed line.
const CONTEXT_LINES: usize = 8;

fn main() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/packets");
    let mut files: Vec<PathBuf> = match fs::read_dir(&folder) {
        Ok(entries) => entries.flatten().map(|entry| entry.path()).collect(),
        Err(_) => Vec::new(),
    };
    files.sort();
    let mut trials: Vec<Trial> = files.iter().flat_map(|file| trials_of(file)).collect();
    trials.push(Trial::test("the_folder_has_scripts", move || match files.is_empty() {
        true => Err("tests/packets is empty".into()),
        false => Ok(()),
    }));
    trials.extend(MUST_FAIL.iter().map(|(name, script, complaint)| {
        Trial::test(format!("a_script_fails_that_{name}"), move || must_fail(script, complaint))
    }));
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

/// Wrong scripts, and the error that the runner must report: a runner that passes everything proves nothing.
const MUST_FAIL: &[(&str, &str, &str)] = &[
    ("is_empty", "# nothing", "empty"),
    ("has_no_queue_pair", "silence", "begins with its qp"),
    ("has_an_unknown_verb", "qp rc\nsing", "no verb"),
    ("has_an_unknown_field", "qp rc\npost send id=1 colour=3", "colour= means nothing"),
    ("expects_too_much", "qp rc\n< ACK psn=1", "got: nothing"),
    ("leaves_a_packet", "qp rc\npost send id=1", "at the end: unexpected: < SEND_ONLY"),
    (
        "acts_before_it_expects",
        "qp rc\npost send id=1\nwait 1ms\n< SEND_ONLY psn=0 ack",
        "unexpected: < SEND_ONLY",
    ),
    ("leaves_a_completion", "qp uc\npost send id=1\n< SEND_ONLY psn=0", "at the end: unexpected: done 1 ok"),
    ("has_a_wrong_psn", "qp rc\npost send id=1\n< SEND_ONLY psn=1 ack", "psn: expected 0x1, got 0x0"),
    ("forgets_a_flag", "qp rc\npost send id=1\n< SEND_ONLY psn=0", "flags: expected [], got [\"ack\"]"),
    (
        "forgets_the_payload",
        "qp rc\npost send id=1 inline=x:01\n< SEND_ONLY psn=0 ack",
        "payload: expected 0, got 1",
    ),
    (
        "has_other_data",
        "qp rc\npost send id=1 inline=x:01\n< SEND_ONLY psn=0 ack data=x:02",
        "byte 0 should be 0x02",
    ),
    ("has_another_timer", "qp rc\npost send id=1\n< SEND_ONLY psn=0 ack\ntimer 1ms", "got: 67108864 ns"),
    ("has_other_memory", "qp rc\nput 0 x:01\nmemory 0:1 untouched", "byte 0 at 0x0"),
    ("has_another_status", "qp uc\npost send id=1\n< SEND_ONLY psn=0\ndone 1 Flushed", "got: done 1 ok"),
    ("expects_no_refusal", "qp rc state=init\npost send id=1", "refused: expected None"),
];

fn must_fail(script: &str, complaint: &str) -> Result<(), Failed> {
    match play("the script", script, &Variables::new()) {
        Ok(()) => Err("it passes".into()),
        Err(failed) => {
            let text = failed.message().unwrap_or_default().to_owned();
            if text.contains(complaint) {
                Ok(())
            } else {
                Err(format!("{complaint:?} is not in:\n{text}").into())
            }
        }
    }
}

/// The tests of a file: one for each set of variables.
fn trials_of(file: &Path) -> Vec<Trial> {
    let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let script = match file.extension().is_some_and(|extension| extension == "pkt") {
        true => fs::read_to_string(file).map_err(|error| error.to_string()),
        false => Err("is not a packet script".to_owned()),
    };
    let sets = script.and_then(|script| Ok((variable_sets(&script)?, script)));
    match sets {
        Err(error) => vec![Trial::test(name, move || Err(error.into()))],
        Ok((sets, script)) => sets
            .into_iter()
            .map(|variables| {
                let suffix: String =
                    variables.iter().map(|(key, value)| format!("[{key}={value}]")).collect();
                let (script, shown) = (script.clone(), format!("tests/packets/{name}.pkt"));
                Trial::test(name.clone() + &suffix, move || play(&shown, &script, &variables))
            })
            .collect(),
    }
}

/// A script's lines without comments and blank lines, with their numbers.
fn statements(script: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = script.lines().enumerate();
    lines
        .map(|(index, line)| (index + 1, line.split('#').next().unwrap_or("").trim()))
        .filter(|(_, line)| !line.is_empty())
}

fn variable_sets(script: &str) -> Result<Vec<Variables>, String> {
    let Some((_, first)) = statements(script).next().filter(|(_, line)| line.starts_with("for ")) else {
        return Ok(vec![Variables::new()]);
    };
    let mut line = Line::new(first, &Variables::new())?;
    line.word("for")?;
    let name = line.word("the variable")?;
    let mut sets = Vec::new();
    while let Some(value) = line.optional_word() {
        sets.push(Variables::from([(name.clone(), line.evaluate(&value)?)]));
    }
    if sets.is_empty() { Err(format!("for {name}: no values")) } else { Ok(sets) }
}

/// Plays a script; a failure shows the lines before it, the line itself and what differs.
fn play(shown: &str, script: &str, variables: &Variables) -> Result<(), Failed> {
    let fail = |number: usize, error: String| {
        let from = number.saturating_sub(CONTEXT_LINES + 1);
        let mut text = format!("{shown}:{number}\n");
        for (index, line) in script.lines().enumerate().take(number).skip(from) {
            let mark = if index + 1 == number { '-' } else { ' ' };
            text += &format!("{mark}{:4} | {line}\n", index + 1);
        }
        text += &format!("+       {error}");
        Failed::from(text)
    };
    let mut machine: Option<Machine> = None;
    let mut last = 0;
    for (number, text) in statements(script).filter(|(_, line)| !line.starts_with("for ")) {
        last = number;
        let line = Line::new(text, variables).map_err(|error| fail(number, error))?;
        let played = match &mut machine {
            Some(machine) => machine.play(line),
            None => set_up(line).map(|made| machine = Some(made)),
        };
        played.map_err(|error| fail(number, error))?;
    }
    let machine = machine.ok_or_else(|| fail(last, "the script is empty".to_owned()))?;
    machine.nothing_left().map_err(|error| fail(last, format!("at the end: {error}")))
}

fn set_up(mut line: Line) -> Result<Machine, String> {
    match line.word("the verb")?.as_str() {
        "qp" => Machine::new(line),
        other => Err(format!("a script begins with its qp, not with {other}")),
    }
}
