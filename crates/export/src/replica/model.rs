//! Explores all interleavings of two writers and three exports, over the code that chooses epochs and orders records.
//!
//! A step is one effect at one export: a lock and the record read under it, a write, a record. The environment ends connections at
//! any time (a lost lease, a killed export), lets a request time out that takes effect later, and crashes writers. An export
//! carries out what has come over a connection until the connection ends, and releases its lock with it: the one promise of
//! the server that the protocol builds on.
//!
//! Data are sets of writes. What must hold in each state is in [`Model::check`].

use std::collections::{HashSet, VecDeque};
use std::net::SocketAddr;

use super::epochs::{Change, Step, newest};
use super::record::{MemberName, Record};

const EXPORTS: usize = 3;
const WRITERS: usize = 2;

/// A set of exports, or of writes.
type Set = u8;

fn has(set: Set, index: usize) -> bool {
    set & 1 << index != 0
}

fn indexes(set: Set) -> impl Iterator<Item = usize> {
    (0..8).filter(move |&index| has(set, index))
}

fn ids(set: Set) -> Vec<u64> {
    indexes(set).map(|index| index as u64).collect()
}

fn set_of(ids: impl IntoIterator<Item = u64>) -> Set {
    ids.into_iter().fold(0, |set, id| set | 1 << id)
}

/// A mistake that is planted into the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Planted {
    Nothing,
    /// A write is acknowledged before the epoch without the failed member is recorded.
    AcknowledgesFirst,
    /// An export that is admitted records the epoch before the survivors.
    AdmittedFirst,
    /// The server carries requests of a connection out after its lock is released.
    Unfenced,
    /// A writer opens the file with the locks of a part of the members.
    OpensByPart,
    /// A writer does not make the members equal that another one has left.
    LeavesUnequal,
}

/// What a request does at an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Effect {
    Write(u8),
    Fill(Set),
    Record(Shown),
}

/// An export's record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shown {
    epoch: u8,
    members: Set,
    is_closed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Export {
    shown: Shown,
    data: Set,
    holder: Option<u8>,
}

/// A connection of a writer to an export.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Connection {
    #[default]
    None,
    Live,
    /// The writer has given it up, and the export has not noticed.
    GivenUp(Option<Effect>),
    /// The export has ended it, and the writer has not noticed.
    Ended,
}

/// What a writer does when an epoch is established.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Then {
    Open,
    Acknowledge(u8),
    GoOn,
    Close,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Phase {
    Idle,
    Locking {
        next: usize,
        locked: Set,
    },
    /// Makes members equal to the first.
    Filling {
        source: usize,
        left: Set,
    },
    Recording {
        change: Change,
        left: Set,
        failed: Set,
        then: Then,
    },
    Ready,
    Writing {
        id: u8,
        left: Set,
        done: Set,
        failed: Set,
    },
    /// Records its epoch at an export that is no member.
    Preparing {
        target: usize,
    },
    Admitting {
        target: usize,
    },
    Crashed,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Writer {
    phase: Phase,
    /// The live members as it believes.
    copies: Set,
    epoch: u8,
    connections: [Connection; EXPORTS],
    lives: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    exports: [Export; EXPORTS],
    writers: [Writer; WRITERS],
    acknowledged: Set,
    writes: u8,
    /// What may still happen.
    disturbances: u8,
    crashes: u8,
    admissions: u8,
}

#[derive(Clone, Copy)]
struct Limits {
    lives: [u8; WRITERS],
    writes: u8,
    disturbances: u8,
    crashes: u8,
    admissions: u8,
}

struct Model {
    planted: Planted,
    limits: Limits,
}

impl Model {
    fn first(&self) -> State {
        let shown = Shown { epoch: 1, members: (1 << EXPORTS) - 1, is_closed: true };
        let export = Export { shown, data: 0, holder: None };
        let writer = |lives| Writer {
            phase: Phase::Idle,
            copies: 0,
            epoch: 0,
            connections: Default::default(),
            lives,
        };
        let Limits { disturbances, crashes, admissions, lives, .. } = self.limits;
        State {
            exports: [export; EXPORTS],
            writers: lives.map(writer),
            acknowledged: 0,
            writes: 0,
            disturbances,
            crashes,
            admissions,
        }
    }

    /// What must hold: an opener that finds the newest epoch, with all its members, finds all that was acknowledged.
    fn check(&self, state: &State) -> Result<(), String> {
        for answering in 1..1 << EXPORTS {
            let newest = newest_of(state, answering);
            let Some(shown) = newest.map_err(|()| "one epoch has two lists of members")? else { continue };
            if shown.members & !answering != 0 {
                continue;
            }
            for member in indexes(shown.members) {
                if state.acknowledged & !state.exports[member].data != 0 {
                    return Err(format!("export {member} lacks an acknowledged write in {shown:?}"));
                }
            }
        }
        Ok(())
    }

    /// Explores all states. Returns how many, or what does not hold in one of them.
    fn explore(&self) -> Result<usize, String> {
        let first = self.first();
        let mut seen = HashSet::from([first.clone()]);
        let mut queue = VecDeque::from([first]);
        while let Some(state) = queue.pop_front() {
            self.check(&state).map_err(|error| format!("{error}: {state:?}"))?;
            for next in self.next(&state)? {
                if seen.insert(next.clone()) {
                    queue.push_back(next);
                }
            }
        }
        Ok(seen.len())
    }

    fn next(&self, state: &State) -> Result<Vec<State>, String> {
        let mut next = Vec::new();
        for index in 0..WRITERS {
            self.disturb(state, index, &mut next);
            self.step(state, index, &mut next)?;
        }
        Ok(next)
    }

    /// What happens to a writer and its connections.
    fn disturb(&self, state: &State, index: usize, next: &mut Vec<State>) {
        let writer = &state.writers[index];
        for export in 0..EXPORTS {
            match writer.connections[export] {
                Connection::Live if state.disturbances > 0 => {
                    let mut state = state.clone();
                    state.disturbances -= 1;
                    release(&mut state, index, export);
                    state.writers[index].connections[export] = Connection::Ended;
                    next.push(state);
                }
                Connection::GivenUp(late) => {
                    if let Some(effect) = late {
                        let mut state = state.clone();
                        apply(&mut state, export, effect);
                        state.writers[index].connections[export] = Connection::GivenUp(None);
                        next.push(state);
                    }
                    let mut state = state.clone();
                    release(&mut state, index, export);
                    let left = Connection::GivenUp(late);
                    // Without a fence what is late takes effect all the same.
                    let is_kept = self.planted == Planted::Unfenced && late.is_some();
                    state.writers[index].connections[export] = if is_kept { left } else { Connection::None };
                    next.push(state);
                }
                _ => {}
            }
        }
        if state.crashes > 0 && !matches!(writer.phase, Phase::Idle | Phase::Crashed) {
            let mut state = state.clone();
            state.crashes -= 1;
            crash(&mut state, index);
            next.push(state);
        }
        if writer.phase == Phase::Crashed && writer.connections == [Connection::None; EXPORTS] {
            let mut state = state.clone();
            state.writers[index].phase = Phase::Idle;
            next.push(state);
        }
    }

    /// What a writer does.
    fn step(&self, state: &State, index: usize, next: &mut Vec<State>) -> Result<(), String> {
        let writer = &state.writers[index];
        match &writer.phase {
            Phase::Crashed => {}
            Phase::Idle if writer.lives == 0 || writer.connections != [Connection::None; EXPORTS] => {}
            Phase::Idle => {
                let mut state = state.clone();
                let writer = &mut state.writers[index];
                writer.lives -= 1;
                writer.phase = Phase::Locking { next: 0, locked: 0 };
                next.push(state);
            }
            &Phase::Locking { next: export, locked } if export < EXPORTS => {
                // It does not answer, or another one has the lock.
                let mut skipped = state.clone();
                skipped.writers[index].phase = Phase::Locking { next: export + 1, locked };
                next.push(skipped);
                if state.exports[export].holder.is_none() {
                    let mut state = state.clone();
                    connect(&mut state, index, export);
                    let locked = locked | 1 << export;
                    state.writers[index].phase = Phase::Locking { next: export + 1, locked };
                    next.push(state);
                }
            }
            &Phase::Locking { locked, .. } => next.push(self.choose(state, index, locked)?),
            &Phase::Filling { source, left } => self.fill(state, index, source, left, next),
            Phase::Recording { change, left, failed, then } => {
                self.record(state, index, change, (*left, *failed), *then, next)?;
            }
            Phase::Ready => self.begin(state, index, next),
            &Phase::Writing { id, left: 0, done, failed } => {
                let mut state = state.clone();
                let writer = &mut state.writers[index];
                writer.copies = done;
                if failed == 0 {
                    writer.phase = Phase::Ready;
                    self.acknowledge(&mut state, index, id)?;
                } else if done == 0 {
                    crash(&mut state, index);
                } else {
                    if self.planted == Planted::AcknowledgesFirst {
                        self.acknowledge(&mut state, index, id)?;
                    }
                    self.change(&mut state, index, done, 0, Then::Acknowledge(id));
                }
                next.push(state);
            }
            &Phase::Writing { id, left, done, failed } => {
                for export in indexes(left) {
                    let left = left & !(1 << export);
                    self.attempt(state, index, export, Effect::Write(id), next, |state, is_done| {
                        let bit = 1 << export;
                        let (done, failed) =
                            if is_done { (done | bit, failed) } else { (done, failed | bit) };
                        state.writers[index].phase = Phase::Writing { id, left, done, failed };
                    });
                }
            }
            &Phase::Preparing { target } => {
                let shown = Shown { epoch: writer.epoch, members: writer.copies, is_closed: false };
                self.attempt(state, index, target, Effect::Record(shown), next, |state, is_done| {
                    let phase = if is_done { Phase::Admitting { target } } else { Phase::Ready };
                    state.writers[index].phase = phase;
                });
            }
            &Phase::Admitting { target } => {
                let source = indexes(writer.copies).next().ok_or("a writer without members is ready")?;
                let data = state.exports[source].data;
                self.attempt(
                    state,
                    index,
                    target,
                    Effect::Fill(data),
                    next,
                    |state, is_done| match is_done {
                        true => self.change(state, index, writer.copies, 1 << target, Then::GoOn),
                        false => state.writers[index].phase = Phase::Ready,
                    },
                );
            }
        }
        Ok(())
    }

    /// Chooses the epoch to go on from.
    fn choose(&self, state: &State, index: usize, locked: Set) -> Result<State, String> {
        let mut state = state.clone();
        // A connection that has ended meanwhile shows nothing.
        let alive =
            indexes(locked).filter(|&export| state.writers[index].connections[export] == Connection::Live);
        let alive = alive.fold(0, |set, export| set | 1 << export);
        let found = newest_of(&state, alive).map_err(|()| "one epoch has two lists of members")?;
        let found = found.filter(|shown| match self.planted {
            Planted::OpensByPart => shown.members & alive != 0,
            _ => shown.members & !alive == 0,
        });
        let Some(shown) = found else {
            crash(&mut state, index);
            return Ok(state);
        };
        let members = shown.members & alive;
        for export in indexes(locked & !members) {
            give_up(&mut state, index, export, None);
        }
        let writer = &mut state.writers[index];
        (writer.copies, writer.epoch) = (members, shown.epoch);
        let source = members.trailing_zeros() as usize;
        let is_equal = shown.is_closed || self.planted == Planted::LeavesUnequal;
        let left = if is_equal { 0 } else { members & !(1 << source) };
        writer.phase = Phase::Filling { source, left };
        Ok(state)
    }

    fn fill(&self, state: &State, index: usize, source: usize, left: Set, next: &mut Vec<State>) {
        if left == 0 {
            let mut state = state.clone();
            let copies = state.writers[index].copies;
            self.change(&mut state, index, copies, 0, Then::Open);
            next.push(state);
        }
        let data = state.exports[source].data;
        for target in indexes(left) {
            if state.writers[index].connections[source] != Connection::Live {
                // The next member becomes the source.
                let mut state = state.clone();
                give_up(&mut state, index, source, None);
                let writer = &mut state.writers[index];
                writer.copies &= !(1 << source);
                let source = writer.copies.trailing_zeros() as usize;
                writer.phase = Phase::Filling { source, left: writer.copies & !(1 << source) };
                next.push(state);
                return;
            }
            self.attempt(state, index, target, Effect::Fill(data), next, |state, is_done| {
                let writer = &mut state.writers[index];
                if !is_done {
                    writer.copies &= !(1 << target);
                }
                writer.phase = Phase::Filling { source, left: left & !(1 << target) };
            });
        }
    }

    /// Begins a change to an epoch.
    fn change(&self, state: &mut State, index: usize, survivors: Set, admitted: Set, then: Then) {
        let writer = &mut state.writers[index];
        let last = writer.epoch.into();
        let change = match self.planted {
            Planted::AdmittedFirst if admitted != 0 => Change::new(last, ids(admitted), ids(survivors)),
            _ => Change::new(last, ids(survivors), ids(admitted)),
        };
        writer.copies = survivors | admitted;
        record(writer, change, then);
    }

    fn record(
        &self,
        state: &State,
        index: usize,
        change: &Change,
        (left, failed): (Set, Set),
        then: Then,
        next: &mut Vec<State>,
    ) -> Result<(), String> {
        if left != 0 {
            let (epoch, members) = (change.number() as u8, set_of(change.members()));
            let shown = Shown { epoch, members, is_closed: then == Then::Close };
            for export in indexes(left) {
                self.attempt(state, index, export, Effect::Record(shown), next, |state, is_done| {
                    let (change, bit) = (change.clone(), 1 << export);
                    let failed = if is_done { failed } else { failed | bit };
                    state.writers[index].phase = Phase::Recording { change, left: left & !bit, failed, then };
                });
            }
            return Ok(());
        }
        let mut state = state.clone();
        let writer = &mut state.writers[index];
        writer.copies &= !failed;
        match change.clone().recorded(&ids(failed)) {
            Step::Record(change) => record(writer, change, then),
            Step::NoneLeft => crash(&mut state, index),
            Step::Established => {
                writer.phase = Phase::Ready;
                let copies = writer.copies;
                match then {
                    Then::Acknowledge(id) => self.acknowledge(&mut state, index, id)?,
                    Then::Open => check_open(&state, copies)?,
                    Then::GoOn => {}
                    // It releases the locks.
                    Then::Close => crash(&mut state, index),
                }
            }
        }
        next.push(state);
        Ok(())
    }

    /// What a writer may begin.
    fn begin(&self, state: &State, index: usize, next: &mut Vec<State>) {
        let copies = state.writers[index].copies;
        if state.writes < self.limits.writes {
            let mut state = state.clone();
            let id = state.writes;
            state.writes += 1;
            state.writers[index].phase = Phase::Writing { id, left: copies, done: 0, failed: 0 };
            next.push(state);
        }
        for target in (0..EXPORTS).filter(|&export| !has(copies, export) && state.admissions > 0) {
            let is_free = state.exports[target].holder.is_none();
            if is_free && state.writers[index].connections[target] == Connection::None {
                let mut state = state.clone();
                state.admissions -= 1;
                connect(&mut state, index, target);
                state.writers[index].phase = Phase::Preparing { target };
                next.push(state);
            }
        }
        let mut closed = state.clone();
        self.change(&mut closed, index, copies, 0, Then::Close);
        next.push(closed);
    }

    fn acknowledge(&self, state: &mut State, index: usize, id: u8) -> Result<(), String> {
        state.acknowledged |= 1 << id;
        for export in indexes(state.writers[index].copies) {
            if state.acknowledged & !state.exports[export].data != 0 {
                return Err(format!("writers diverge: export {export} lacks a write in {state:?}"));
            }
        }
        Ok(())
    }

    /// A request to an export: it is done, it fails because the connection has ended, or nobody answers in time, and it may be
    /// done later.
    fn attempt(
        &self,
        state: &State,
        index: usize,
        export: usize,
        effect: Effect,
        next: &mut Vec<State>,
        then: impl Fn(&mut State, bool),
    ) {
        let connection = state.writers[index].connections[export];
        if connection == Connection::Live || self.planted == Planted::Unfenced {
            let mut state = state.clone();
            apply(&mut state, export, effect);
            then(&mut state, true);
            next.push(state);
        }
        let mut state = state.clone();
        match connection {
            Connection::Live if state.disturbances == 0 => return,
            Connection::Live => {
                state.disturbances -= 1;
                give_up(&mut state, index, export, Some(effect));
            }
            _ => give_up(&mut state, index, export, None),
        }
        then(&mut state, false);
        next.push(state);
    }
}

/// What a writer that has opened the file finds.
fn check_open(state: &State, copies: Set) -> Result<(), String> {
    let data: HashSet<_> = indexes(copies).map(|export| state.exports[export].data).collect();
    match data.len() {
        1 => Ok(()),
        _ => Err(format!("the members of a file that was opened differ: {state:?}")),
    }
}

/// The newest epoch that these exports show; an error if records exclude each other.
fn newest_of(state: &State, answering: Set) -> Result<Option<Shown>, ()> {
    let record = |export: usize| {
        let Shown { epoch, members, is_closed } = state.exports[export].shown;
        let address = SocketAddr::from(([192, 0, 2, 1], 7447));
        let members = ids(members).into_iter().map(|id| MemberName { id, address }).collect();
        Record { set: 1, own: export as u64, epoch: epoch.into(), is_closed, members }
    };
    let exports: Vec<_> = indexes(answering).collect();
    let records: Vec<_> = exports.iter().map(|&export| record(export)).collect();
    let records: Vec<_> = records.iter().collect();
    let place = newest(&records).map_err(|_| ())?;
    Ok(place.map(|place| state.exports[exports[place]].shown))
}

fn apply(state: &mut State, export: usize, effect: Effect) {
    let export = &mut state.exports[export];
    match effect {
        Effect::Write(id) => export.data |= 1 << id,
        Effect::Fill(data) => export.data = data,
        Effect::Record(shown) => export.shown = shown,
    }
}

fn record(writer: &mut Writer, change: Change, then: Then) {
    writer.epoch = change.number() as u8;
    let left = set_of(change.targets().iter().copied());
    writer.phase = Phase::Recording { change, left, failed: 0, then };
}

fn connect(state: &mut State, index: usize, export: usize) {
    state.exports[export].holder = Some(index as u8);
    state.writers[index].connections[export] = Connection::Live;
}

/// The export releases a writer's lock.
fn release(state: &mut State, index: usize, export: usize) {
    if state.exports[export].holder == Some(index as u8) {
        state.exports[export].holder = None;
    }
}

/// A writer gives up a connection, over which a request may be under way.
fn give_up(state: &mut State, index: usize, export: usize, late: Option<Effect>) {
    let connection = &mut state.writers[index].connections[export];
    *connection = match connection {
        Connection::Live => Connection::GivenUp(late),
        _ => Connection::None,
    };
}

/// A writer is gone. What it has sent may still take effect.
fn crash(state: &mut State, index: usize) {
    let writer = &state.writers[index];
    let (effect, left) = match &writer.phase {
        &Phase::Writing { id, left, .. } => (Some(Effect::Write(id)), left),
        Phase::Recording { change, left, then, .. } => {
            let (epoch, members) = (change.number() as u8, set_of(change.members()));
            (Some(Effect::Record(Shown { epoch, members, is_closed: *then == Then::Close })), *left)
        }
        _ => (None, 0),
    };
    for export in 0..EXPORTS {
        give_up(state, index, export, effect.filter(|_| has(left, export)));
    }
    let writer = &mut state.writers[index];
    (writer.copies, writer.epoch, writer.phase) = (0, 0, Phase::Crashed);
}

const LIMITS: Limits = Limits { lives: [1, 1], writes: 2, disturbances: 1, crashes: 1, admissions: 1 };

#[test]
fn writers_never_diverge() {
    let model = Model { planted: Planted::Nothing, limits: LIMITS };
    let count = model.explore().unwrap();
    assert!(count > 100_000, "{count} states");
}

#[test]
fn planted_mistakes_are_found() {
    for planted in [
        Planted::AcknowledgesFirst,
        Planted::AdmittedFirst,
        Planted::Unfenced,
        Planted::OpensByPart,
        Planted::LeavesUnequal,
    ] {
        let model = Model { planted, limits: LIMITS };
        assert!(model.explore().is_err(), "{planted:?} is not found");
    }
}
