//! `kvtier top`: a server's load on the terminal, again and again.

mod sample;
mod view;

use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Args;
use kvtier_bench::cli::stop;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::text::Text;
use tokio::signal::unix::SignalKind;

use crate::address::HttpArgs;
use crate::out;
use crate::units::duration;
use crate::web::{AccessArgs, Client};
use sample::Sample;
use view::View;

/// Longest time until a key has an effect.
const KEY_INTERVAL: Duration = Duration::from_millis(100);

/// Arguments of `kvtier top`.
#[derive(Debug, Args)]
pub struct TopArgs {
    #[command(flatten)]
    server: HttpArgs,
    /// Time between two samples, in seconds or as in 500ms, 30s, 2m
    #[arg(long, default_value = "2", value_parser = duration)]
    interval: Duration,
    /// Print the load of one interval as text, and end
    #[arg(long)]
    once: bool,
    /// Timeout of a request, in seconds or as in 500ms, 30s, 2m
    #[arg(long, default_value = "3", value_parser = duration)]
    timeout: Duration,
    #[command(flatten)]
    access: AccessArgs,
}

/// Shows the load until `q`; with `--once` prints it, exit code 1 if the server does not answer.
pub(crate) fn run(args: &TopArgs) -> anyhow::Result<ExitCode> {
    let url = args.server.url();
    let client = Client::new(url, &args.access, args.timeout)?;
    let mut view = View::new(url);
    if args.once {
        while !view.is_complete() {
            view.update(Sample::take(&client));
            if let Some(error) = view.error() {
                bail!("{error}");
            }
            if !view.is_complete() {
                std::thread::sleep(args.interval);
            }
        }
        for line in view.lines() {
            writeln!(out::stdout(), "{}", line.to_string().trim_end())?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    if !std::io::stdout().is_terminal() {
        bail!("stdout is no terminal; --once prints the load as text");
    }
    let (send, samples) = sync_channel(1);
    let interval = args.interval;
    let thread = std::thread::Builder::new().name("kvtier-top".into());
    thread
        .spawn(move || sample(&client, interval, &send))
        .context("no thread for samples")?;
    let kinds = [
        SignalKind::terminate(),
        SignalKind::hangup(),
        SignalKind::interrupt(),
    ];
    let stop = stop::flag_at(&kinds, |_| {})?;
    let mut terminal = ratatui::try_init().context("the terminal cannot be used")?;
    let outcome = show(&mut terminal, &mut view, &samples, &stop);
    ratatui::restore();
    outcome.map(|()| ExitCode::SUCCESS)
}

/// Takes samples until nothing receives them: a server that does not answer must not delay a key.
fn sample(client: &Client, interval: Duration, samples: &SyncSender<anyhow::Result<Sample>>) {
    while samples.send(Sample::take(client)).is_ok() {
        std::thread::sleep(interval);
    }
}

/// Draws what changes, until a key or a signal ends it.
fn show(
    terminal: &mut DefaultTerminal,
    view: &mut View,
    samples: &Receiver<anyhow::Result<Sample>>,
    stop: &AtomicBool,
) -> anyhow::Result<()> {
    let mut is_new = true;
    while !stop.load(Ordering::Relaxed) {
        match samples.try_recv() {
            Ok(outcome) => {
                view.update(outcome);
                is_new = true;
            }
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => bail!("the thread for samples has ended"),
        }
        if is_new {
            let mut lines = view.lines();
            lines.push(ratatui::text::Line::default());
            lines.push(ratatui::text::Line::raw("q quit, p pause"));
            terminal.draw(|frame| frame.render_widget(Text::from(lines), frame.area()))?;
            is_new = false;
        }
        if !event::poll(KEY_INTERVAL)? {
            continue;
        }
        // A resize is drawn too.
        is_new = true;
        let Event::Key(key) = event::read()? else {
            continue;
        };
        let is_interrupt =
            key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            _ if key.kind == KeyEventKind::Release => {}
            KeyCode::Char('q') | KeyCode::Esc => return Ok(()),
            _ if is_interrupt => return Ok(()),
            KeyCode::Char('p' | ' ') => view.is_paused = !view.is_paused,
            _ => {}
        }
    }
    Ok(())
}
