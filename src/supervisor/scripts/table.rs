//! All pairs: what every event does in every state, as a table. A change of a decision is a change of a cell.

use crate::signal::Signal;
use crate::supervisor::exit::Exit;
use crate::supervisor::service::{Rung, State};
use crate::supervisor::{Action, Event, Policy, Supervisor, Target, Time};
use std::time::Duration;

/// A cell is what is done, then the state that it leads to: "." is nothing and nowhere, `m`, `g` and `t` are who gets a
/// signal. An event comes 1 ms after the state was entered, when its deadline is `due`, or `late`, that is long after.
///
/// The states: `down`; `start`ing; `up`; `stop`ping; `killed`, that is stopping and the main process got SIGKILL, the
/// stop timeout after the request; emptying with SIGTERM, `term`, and with SIGKILL, `kill`.
const TABLE: &str = "
event         down         start              up                 stop           killed      term        kill
Start         spawn>start  .                  .                  .              .           .           .
Sweep         look>term    .                  .                  .              .           .           .
Started       .            >up                .                  .              .           .           .
StartFailed   .            >term              .                  >term          >term       .           .
Exited        .            >term              >term              >term          >term       .           .
MainStopped   .            suspend            suspend            .              .           .           .
TERM          .            g:HUP,g:CONT>stop  g:HUP,g:CONT>stop  .              kill>kill   .           .
INT           .            g:INT,g:CONT>stop  g:INT,g:CONT>stop  .              kill>kill   .           .
PIPE=QUIT     .            g:QUIT,g:CONT>stop g:QUIT,g:CONT>stop .              kill>kill   .           .
HUP           .            m:HUP              m:HUP              m:HUP          m:HUP       .           .
RTMIN+3       .            m:RTMIN+3          m:RTMIN+3          m:RTMIN+3      m:RTMIN+3   .           .
HUP=PIPE      .            m:PIPE             m:PIPE             m:PIPE         m:PIPE      .           .
TSTP          .            g:TSTP             g:TSTP             .              .           .           .
CONT          .            resume             resume             resume         resume      .           .
TreeChanged   .            .                  .                  .              .           .           kill
TreeEmpty     .            .                  .                  .              .           end>down    end>down
SurvivorsNamed .           .                  .                  .              .           .           end>down
GuardLost     .            kill>kill          kill>kill          kill>kill      kill>kill   kill>kill   .
Tick          .            .                  .                  .              .           .           .
due           .            g:HUP,g:CONT>stop  g:HUP,g:CONT>stop  m:KILL>killed  look>term   look        kill
late          .            g:HUP,g:CONT>stop  g:HUP,g:CONT>stop  m:KILL>killed  look>term   kill>kill   name
TERM,late     .            g:HUP,g:CONT>stop  g:HUP,g:CONT>stop  kill>kill      kill>kill   kill>kill   .
";

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn every_event_in_every_state_does_what_the_table_says() {
    let mut rows = TABLE.trim().lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let states = rows.next().unwrap();
    for row in rows {
        assert_eq!(row.len(), states.len(), "{row:?}");
        for (state, expected) in states.iter().zip(&row).skip(1) {
            assert_eq!(cell(state, row[0]), *expected, "{} in {state}", row[0]);
        }
    }
}

/// What really comes of it.
fn cell(state: &str, row: &str) -> String {
    let (mut supervisor, entered) = brought_to(state);
    let before = name(supervisor.state);
    let (event, now) = event(row, &supervisor, entered);
    let done = words(&supervisor.handle(now, event));
    let after = name(supervisor.state);
    match (done.is_empty(), after == before) {
        (true, true) => ".".to_owned(),
        (false, true) => done,
        (_, false) => format!("{done}>{after}"),
    }
}

fn brought_to(state: &str) -> (Supervisor, Time) {
    let policy = Policy {
        stop_signal: Signal::HUP,
        stop_target: Target::Group,
        stop_timeout: 7 * SECOND,
        leftover_timeout: 2 * SECOND,
        kill_timeout: 5 * SECOND,
        run_timeout: Some(60 * SECOND),
        job_control: true,
    };
    let term = Event::Signal { received: Signal::TERM, wanted: Signal::TERM };
    let exited = Event::Exited(Exit::Code(0));
    let zero = Duration::ZERO;
    let way = match state {
        "down" => vec![],
        "start" => vec![(zero, Event::Start)],
        "up" => vec![(zero, Event::Start), (zero, Event::Started)],
        "stop" => vec![(zero, Event::Start), (zero, Event::Started), (zero, term)],
        "killed" => vec![(zero, Event::Start), (zero, Event::Started), (zero, term), (7 * SECOND, Event::Tick)],
        "term" => vec![(zero, Event::Start), (zero, term), (zero, exited), (zero, Event::TreeChanged)],
        "kill" => vec![
            (zero, Event::Start),
            (zero, term),
            (zero, exited),
            (zero, Event::TreeChanged),
            (2 * SECOND, Event::Tick),
        ],
        other => panic!("no state is called {other}"),
    };
    let entered = way.last().map_or(zero, |(at, _)| *at);
    let mut supervisor = Supervisor::new(policy);
    for (at, event) in way {
        let _ = supervisor.handle(Time(at), event);
    }
    assert_eq!(name(supervisor.state), state);
    (supervisor, Time(entered))
}

/// The event of a row and its moment.
fn event(row: &str, supervisor: &Supervisor, entered: Time) -> (Event, Time) {
    let soon = entered.after(Duration::from_millis(1));
    let late = entered.after(100 * SECOND);
    let event = match row {
        "Start" => Event::Start,
        "Started" => Event::Started,
        "StartFailed" => Event::StartFailed,
        "Exited" => Event::Exited(Exit::Code(0)),
        "MainStopped" => Event::MainStopped,
        "TreeChanged" => Event::TreeChanged,
        "TreeEmpty" => Event::TreeEmpty,
        "GuardLost" => Event::GuardLost,
        "SurvivorsNamed" => Event::SurvivorsNamed,
        "Sweep" => Event::Sweep,
        "Tick" => Event::Tick,
        "due" => return (Event::Tick, supervisor.deadline().unwrap_or(late)),
        "late" => return (Event::Tick, late),
        "TERM,late" => return (Event::Signal { received: Signal::TERM, wanted: Signal::TERM }, late),
        signals => {
            let (received, wanted) = signals.split_once('=').unwrap_or((signals, signals));
            Event::Signal { received: received.parse().unwrap(), wanted: wanted.parse().unwrap() }
        }
    };
    (event, soon)
}

fn name(state: State) -> &'static str {
    match state {
        State::Down => "down",
        State::Starting => "start",
        State::Up => "up",
        State::Stopping { killed: false, .. } => "stop",
        State::Stopping { killed: true, .. } => "killed",
        State::Emptying { rung: Rung::Terminate, .. } => "term",
        State::Emptying { rung: Rung::Kill { .. }, .. } => "kill",
    }
}

fn words(actions: &[Action]) -> String {
    let words: Vec<String> = actions.iter().map(word).collect();
    words.join(",")
}

fn word(action: &Action) -> String {
    let (target, signal) = match action {
        Action::Spawn => return "spawn".to_owned(),
        Action::Suspend => return "suspend".to_owned(),
        Action::Resume => return "resume".to_owned(),
        Action::TerminateLeftovers(_) => return "look".to_owned(),
        Action::KillTree(_) => return "kill".to_owned(),
        Action::NameSurvivors => return "name".to_owned(),
        Action::End(_) => return "end".to_owned(),
        Action::Signal(Target::Main, signal) => ("m", signal),
        Action::Signal(Target::Group, signal) => ("g", signal),
        Action::Signal(Target::Tree, signal) => ("t", signal),
    };
    format!("{target}:{}", signal.to_string().trim_start_matches("SIG"))
}
