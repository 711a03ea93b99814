//! Draws the screen: processes, then the port, the regions and the queue pairs of the chosen one. All of them fit 80
//! columns and 24 lines.

use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Cell, Paragraph, Row, Table, Wrap};
use terrace_nic::stat::{Counts, DeviceSnapshot, QpSnapshot};
use terrace_pages::{MemoryStats, RegionStats};

use super::Screen;
use super::sample::{Process, rate, rate_of, short};
use crate::regions::name_of;
use crate::stat::memory;

const MIB: f64 = (1 << 20) as f64;
/// Processes and regions that are listed at most.
const PROCESSES_MAX: usize = 4;
const REGIONS_MAX: usize = 4;
/// Characters of the bar of a region's resident share.
const BAR_WIDTH: usize = 10;
const NOTHING_HERE: &str = "\
no process runs with Terrace

Start one in another terminal, for example
    terrace run -- ib_write_bw
or check what works here:
    terrace doctor

This screen shows it as soon as it opens its device.";

/// Draws the screen.
pub fn draw(frame: &mut Frame<'_>, screen: &Screen) {
    let [title, body] = Layout::vertical([Constraint::Length(1), Constraint::Min(0)]).areas(frame.area());
    draw_title(frame, title, screen);
    let Some(chosen) = screen.chosen_index() else {
        return frame.render_widget(Paragraph::new(NOTHING_HERE).wrap(Wrap { trim: false }), inner(body));
    };
    let details = Details::of(screen, &screen.now.processes[chosen]);
    let regions = details.regions.len().min(REGIONS_MAX);
    let areas: [Rect; 4] = Layout::vertical([
        Constraint::Length(screen.now.processes.len().min(PROCESSES_MAX) as u16 + 2),
        Constraint::Length(4),
        Constraint::Length(if regions == 0 { 0 } else { regions as u16 + 2 }),
        Constraint::Min(3),
    ])
    .areas(body);
    draw_processes(frame, areas[0], screen, chosen);
    draw_port(frame, areas[1], &details);
    if regions > 0 {
        draw_regions(frame, areas[2], &details);
    }
    draw_queue_pairs(frame, areas[3], &details);
}

fn inner(area: Rect) -> Rect {
    Rect {
        x: area.x + 2,
        y: area.y + 1,
        width: area.width.saturating_sub(4),
        height: area.height.saturating_sub(1),
    }
}

fn draw_title(frame: &mut Frame<'_>, area: Rect, screen: &Screen) {
    let count = screen.now.processes.len();
    let noun = if count == 1 { "process" } else { "processes" };
    let left = format!("terrace top: {count} {noun}, every {} s", screen.interval_s);
    frame.render_widget(Paragraph::new(left).bold(), area);
    frame.render_widget(Paragraph::new("q quits, arrows choose").alignment(Alignment::Right), area);
}

fn section(title: impl Into<Line<'static>>) -> Block<'static> {
    Block::new().borders(Borders::TOP).title(title)
}

/// A table with a header. All columns but the first ones are numbers, at the right.
fn table(
    title: String,
    header: &[&'static str],
    texts: usize,
    widths: &[u16],
    rows: Vec<Row<'static>>,
) -> Table<'static> {
    let cells = header.iter().enumerate().map(|(column, name)| aligned((*name).to_owned(), column >= texts));
    let widths: Vec<Constraint> = widths.iter().map(|width| Constraint::Length(*width)).collect();
    Table::new(rows, widths).header(Row::new(cells).dim()).block(section(title))
}

fn aligned(text: String, is_number: bool) -> Cell<'static> {
    Cell::from(Line::from(text).alignment(if is_number { Alignment::Right } else { Alignment::Left }))
}

/// A row whose cells after the first `texts` ones are numbers.
fn row(cells: Vec<String>, texts: usize) -> Row<'static> {
    Row::new(cells.into_iter().enumerate().map(|(column, text)| aligned(text, column >= texts)))
}

// ---- processes ---------------------------------------------------------------------------------------------------------

fn draw_processes(frame: &mut Frame<'_>, area: Rect, screen: &Screen, chosen: usize) {
    let seconds = screen.seconds();
    // The chosen process stays on the screen.
    let first = chosen.saturating_sub(PROCESSES_MAX - 1);
    let shown = screen.now.processes.iter().enumerate().skip(first).take(PROCESSES_MAX);
    let rows = shown.map(|(index, process)| {
        let row = row(process_cells(process, screen, seconds), 3);
        if index == chosen { row.style(Style::new().reversed()) } else { row }
    });
    let rows: Vec<Row<'static>> = rows.collect();
    let header = ["PID", "PROGRAM", "ADDRESS", "PAIRS", "TX/s", "RX/s", "MiB/s"];
    let hidden = screen.now.processes.len() - rows.len();
    let title = if hidden == 0 { "processes".to_owned() } else { format!("processes ({hidden} more)") };
    frame.render_widget(table(title, &header, 3, &[8, 16, 22, 6, 7, 7, 7], rows), area);
}

fn process_cells(process: &Process, screen: &Screen, seconds: f64) -> Vec<String> {
    let devices = match &process.answer {
        Ok(devices) => devices,
        Err(error) => return vec![process.pid.to_string(), process.program.clone(), error.clone()],
    };
    let before = screen.before.as_ref().map(|sample| sample.devices(process.pid));
    let rate = |name: &str| {
        sum(devices.iter().enumerate().map(|(index, device)| {
            rate_of(
                name,
                &device.port,
                before.and_then(|before| before.get(index)).map(|device| &device.port),
                seconds,
            )
        }))
    };
    let bytes = sum([rate("tx_bytes"), rate("rx_bytes"), direct_bytes(devices, before, seconds)].into_iter());
    vec![
        process.pid.to_string(),
        process.program.clone(),
        devices.first().and_then(|device| device.addresses.first().cloned()).unwrap_or_default(),
        devices.iter().map(|device| device.queue_pairs.len()).sum::<usize>().to_string(),
        short(rate("tx_packets")),
        short(rate("rx_packets")),
        short(bytes.map(|bytes| bytes / MIB)),
    ]
}

/// The sum of the numbers that are there.
fn sum(numbers: impl Iterator<Item = Option<f64>>) -> Option<f64> {
    numbers.flatten().reduce(|sum, number| sum + number)
}

/// Bytes that the processes have copied from and to same-host peers themselves.
fn direct_bytes(devices: &[DeviceSnapshot], before: Option<&[DeviceSnapshot]>, seconds: f64) -> Option<f64> {
    let total = |devices: &[DeviceSnapshot]| -> u64 {
        let pairs = devices.iter().flat_map(|device| &device.queue_pairs);
        pairs.filter_map(|pair| pair.counts.get("direct_bytes")).sum()
    };
    rate(total(devices), before.map(total), seconds)
}

// ---- the chosen process ------------------------------------------------------------------------------------------------

/// What is shown of the chosen process.
struct Details {
    title: String,
    /// Why nothing is shown of it.
    error: Option<String>,
    /// Names and rates.
    port: Vec<(&'static str, Option<f64>)>,
    memory: String,
    /// Each with its state before.
    regions: Vec<(RegionStats, Option<RegionStats>)>,
    pairs: Vec<(QpSnapshot, Option<QpSnapshot>)>,
    seconds: f64,
}

impl Details {
    fn of(screen: &Screen, process: &Process) -> Details {
        let seconds = screen.seconds();
        let now = screen.now.devices(process.pid);
        let before = screen.before.as_ref().map_or(&[][..], |sample| sample.devices(process.pid));
        let memories: Vec<MemoryStats> = now.iter().filter_map(memory).collect();
        let earlier: Vec<RegionStats> =
            before.iter().filter_map(memory).flat_map(|memory| memory.regions).collect();
        let regions = memories.iter().flat_map(|memory| memory.regions.clone());
        let pairs = now.iter().flat_map(|device| device.queue_pairs.clone());
        Details {
            title: format!("process {} ({})", process.pid, process.program),
            error: process.answer.as_ref().err().cloned(),
            port: port_rates(now, before, seconds),
            memory: memories.iter().map(memory_text).collect(),
            regions: regions
                .map(|region| {
                    let then = earlier.iter().find(|then| then.addr == region.addr).cloned();
                    (region, then)
                })
                .collect(),
            pairs: most_active_first(pairs, before, seconds),
            seconds,
        }
    }
}

impl Screen {
    /// The time between the samples.
    fn seconds(&self) -> f64 {
        self.before.as_ref().map_or(0.0, |before| self.now.at.duration_since(before.at).as_secs_f64())
    }
}

fn memory_text(memory: &MemoryStats) -> String {
    let mib = |bytes: u64| bytes >> 20;
    format!(
        "regions: {} of {} MiB resident, {} dirty, {} requests in flight",
        mib(memory.resident_bytes),
        mib(memory.budget_bytes),
        mib(memory.dirty_bytes),
        memory.io_in_flight
    )
}

/// The counters that explain speed: packets, repairs, losses, injected faults.
fn port_rates(
    now: &[DeviceSnapshot],
    before: &[DeviceSnapshot],
    seconds: f64,
) -> Vec<(&'static str, Option<f64>)> {
    let of_counts = |pick: fn(&DeviceSnapshot) -> &Counts, names: &[&str]| {
        sum(now.iter().enumerate().flat_map(|(index, device)| {
            let before = before.get(index).map(pick);
            names.iter().map(move |name| rate_of(name, pick(device), before, seconds)).collect::<Vec<_>>()
        }))
    };
    let of_pairs = |name: &str| {
        let total = |devices: &[DeviceSnapshot]| -> u64 {
            devices
                .iter()
                .flat_map(|device| &device.queue_pairs)
                .filter_map(|pair| pair.counts.get(name))
                .sum()
        };
        rate(total(now), (!before.is_empty()).then(|| total(before)), seconds)
    };
    let all =
        |devices: &[DeviceSnapshot]| devices.iter().flat_map(|device| device.injected.values()).sum::<u64>();
    vec![
        ("tx packets", of_counts(|device| &device.port, &["tx_packets"])),
        ("rx packets", of_counts(|device| &device.port, &["rx_packets"])),
        ("rx overflows", of_counts(|device| &device.port, &["rx_overflows"])),
        (
            "dropped",
            of_counts(
                |device| &device.dropped,
                &["malformed", "unknown_qp", "unknown_group", "wrong_partition", "management"],
            ),
        ),
        ("retransmits", of_pairs("retransmits")),
        ("timeouts", of_pairs("timeouts")),
        ("RNR NAKs", sum([of_pairs("rnr_naks_sent"), of_pairs("rnr_naks_received")].into_iter())),
        ("injected faults", rate(all(now), (!before.is_empty()).then(|| all(before)), seconds)),
    ]
}

fn draw_port(frame: &mut Frame<'_>, area: Rect, details: &Details) {
    let lines: Vec<Line<'static>> = match &details.error {
        Some(error) => vec![Line::from(error.clone())],
        // Packets and losses, repairs and faults.
        None => details.port.chunks(4).map(|part| part.iter().map(rate_span).collect()).collect(),
    };
    let title = format!("{}: rates per second", details.title);
    frame.render_widget(Paragraph::new(lines).block(section(title)), area);
}

fn rate_span((name, rate): &(&'static str, Option<f64>)) -> Span<'static> {
    let text = format!("{:<20}", format!("{name} {}", short(*rate)));
    // Packets are usual; all others explain low speed.
    let is_trouble = !name.ends_with("packets") && rate.is_some_and(|rate| rate > 0.0);
    if is_trouble { text.yellow() } else { text.into() }
}

// ---- regions -----------------------------------------------------------------------------------------------------------

fn draw_regions(frame: &mut Frame<'_>, area: Rect, details: &Details) {
    let heats: Vec<Option<f64>> =
        details.regions.iter().map(|(now, then)| heat(now, then.as_ref(), details.seconds)).collect();
    let hottest = heats.iter().flatten().copied().fold(0.0, f64::max);
    let regions = details.regions.iter().zip(heats).take(REGIONS_MAX);
    let rows =
        regions.map(|((now, then), heat)| region_row(now, then.as_ref(), heat, hottest, details.seconds));
    let header = ["REGION", "RESIDENT", "MiB", "HIT %", "HITS/s", "MISS/s", "READ/s", "WRITE/s", "HEAT"];
    let rows: Vec<Row<'static>> = rows.collect();
    let hidden = details.regions.len() - rows.len();
    let title =
        if hidden == 0 { details.memory.clone() } else { format!("{} ({hidden} more)", details.memory) };
    frame.render_widget(table(title, &header, 2, &[12, 16, 6, 5, 6, 6, 6, 7, 5], rows), area);
}

/// Accesses a second for each MiB of a region.
fn heat(now: &RegionStats, then: Option<&RegionStats>, seconds: f64) -> Option<f64> {
    let accesses = |region: &RegionStats| region.hits + region.misses;
    let mib = (now.len_bytes as f64 / MIB).max(1.0);
    rate(accesses(now), then.map(accesses), seconds).map(|rate| rate / mib)
}

fn region_row(
    now: &RegionStats,
    then: Option<&RegionStats>,
    heat: Option<f64>,
    hottest: f64,
    seconds: f64,
) -> Row<'static> {
    let share = now.resident_bytes as f64 / now.len_bytes.max(1) as f64;
    let rate = |count: fn(&RegionStats) -> u64| short(rate(count(now), then.map(count), seconds));
    let (hits, misses) = (
        now.hits - then.map_or(0, |then| then.hits.min(now.hits)),
        now.misses - then.map_or(0, |then| then.misses.min(now.misses)),
    );
    let hit_ratio = (hits + misses > 0).then(|| hits as f64 / (hits + misses) as f64 * 100.0);
    let bar = Line::from(vec![
        bar(share).fg(colour(heat.unwrap_or(0.0), hottest)),
        format!(" {:>3.0} %", share * 100.0).into(),
    ]);
    let numbers = [
        format!("{:.0}", now.len_bytes as f64 / MIB),
        hit_ratio.map_or("-".into(), |ratio| format!("{ratio:.1}")),
        rate(|region| region.hits),
        rate(|region| region.misses),
        rate(|region| region.pages_read),
        rate(|region| region.pages_written),
        short(heat),
    ];
    let cells = [Cell::from(name_of(now)), Cell::from(bar)].into_iter();
    Row::new(cells.chain(numbers.map(|number| aligned(number, true))))
}

/// A bar of a share between 0 and 1.
fn bar(share: f64) -> String {
    let full = ((share * BAR_WIDTH as f64).round() as usize).min(BAR_WIDTH);
    "█".repeat(full) + &"░".repeat(BAR_WIDTH - full)
}

/// Blue for a region without accesses, red for the one with the most of each MiB.
fn colour(heat: f64, hottest: f64) -> Color {
    match if hottest > 0.0 { heat / hottest } else { 0.0 } {
        share if share >= 0.75 => Color::Red,
        share if share >= 0.25 => Color::Yellow,
        share if share > 0.0 => Color::Green,
        _ => Color::Blue,
    }
}

// ---- queue pairs -------------------------------------------------------------------------------------------------------

/// The bytes that a queue pair has moved.
fn bytes_of(pair: &QpSnapshot) -> u64 {
    ["tx_bytes", "rx_bytes", "direct_bytes"].iter().filter_map(|name| pair.counts.get(*name)).sum()
}

/// Queue pairs with their state before, those that have moved the most bytes since then first.
fn most_active_first(
    pairs: impl Iterator<Item = QpSnapshot>,
    before: &[DeviceSnapshot],
    seconds: f64,
) -> Vec<(QpSnapshot, Option<QpSnapshot>)> {
    let earlier =
        |qpn: u32| before.iter().flat_map(|device| &device.queue_pairs).find(|then| then.qpn == qpn).cloned();
    let mut pairs: Vec<(QpSnapshot, Option<QpSnapshot>)> =
        pairs.map(|pair| (earlier(pair.qpn), pair)).map(|(then, pair)| (pair, then)).collect();
    let activity = |(now, then): &(QpSnapshot, Option<QpSnapshot>)| {
        rate(bytes_of(now), then.as_ref().map(bytes_of), seconds).unwrap_or(0.0)
    };
    // The sort is stable: queue pairs without traffic stay in the order of their numbers.
    pairs.sort_by(|left, right| activity(right).total_cmp(&activity(left)));
    pairs
}

fn draw_queue_pairs(frame: &mut Frame<'_>, area: Rect, details: &Details) {
    // A border and the header.
    let room = usize::from(area.height.saturating_sub(2));
    let rows: Vec<Row<'static>> = details
        .pairs
        .iter()
        .take(room)
        .map(|(now, then)| row(pair_cells(now, then.as_ref(), details.seconds), 4))
        .collect();
    let hidden = details.pairs.len() - rows.len();
    let title = match hidden {
        0 => "queue pairs".to_owned(),
        hidden => format!("queue pairs, the most active ones ({hidden} more: terrace stat PID)"),
    };
    let header = ["QPN", "TYPE", "STATE", "PEER", "SENDS", "RECVS", "OPS/s", "MiB/s", "RETR/s"];
    frame.render_widget(table(title, &header, 4, &[8, 4, 5, 26, 5, 5, 6, 6, 6], rows), area);
}

fn pair_cells(now: &QpSnapshot, then: Option<&QpSnapshot>, seconds: f64) -> Vec<String> {
    let rate_of = |name: &str| rate_of(name, &now.counts, then.map(|then| &then.counts), seconds);
    let operations = sum([rate_of("requests"), rate_of("direct")].into_iter());
    let bytes = rate(bytes_of(now), then.map(bytes_of), seconds);
    vec![
        format!("{:#08x}", now.qpn),
        now.kind.clone(),
        now.state.clone(),
        now.remote.clone().unwrap_or_else(|| "-".into()),
        now.send_queue_len.to_string(),
        now.receive_queue_len.to_string(),
        short(operations),
        short(bytes.map(|bytes| bytes / MIB)),
        short(rate_of("retransmits")),
    ]
}

#[cfg(test)]
#[path = "view_tests.rs"]
mod tests;
