{{- /* Where NATS is: `urls` of the values, or the service of the dependency. */}}
{{- define "kvscope.busUrls" -}}
{{- if .Values.bus.urls -}}
{{ dict "urls" .Values.bus.urls | toJson }}
{{- else if .Values.nats.enabled -}}
{{ dict "urls" (list (printf "tls://%s:4222" (include "nats.fullname" .Subcharts.nats))) | toJson }}
{{- else -}}
{{ fail "bus.enabled needs servers: name bus.urls, or set nats.enabled=true for the dependency" }}
{{- end -}}
{{- end }}

{{- define "kvscope.clientCertificate" -}}
{{ include "kvscope.fullname" . }}-nats-client
{{- end }}

{{- /* The Secret with certificates of NATS's clients and the keys in it, as JSON; an empty secret if there is none. */}}
{{- define "kvscope.busTls" -}}
{{- if .Values.bus.certManager.enabled -}}
{{ dict "secret" (include "kvscope.clientCertificate" .) "ca" "ca.crt" "cert" "tls.crt" "key" "tls.key" | toJson }}
{{- else -}}
{{ .Values.bus.tls | toJson }}
{{- end -}}
{{- end }}

{{- /* The keys of the configuration file that begin with nats. */}}
{{- define "kvscope.busConfig" -}}
{{- $tls := include "kvscope.busTls" . | fromJson -}}
{{- if not (or .Values.bus.credentials.secret $tls.cert) }}
{{- fail "bus.enabled needs an identity: name bus.credentials.secret or bus.tls.secret with cert and key, or set bus.certManager.enabled=true" }}
{{- end -}}
nats = {{ (include "kvscope.busUrls" . | fromJson).urls | toJson }}
nats_tenant = {{ .Values.bus.tenant | quote }}
{{- if .Values.bus.credentials.secret }}
nats_creds = "/etc/kvscope/credentials/{{ .Values.bus.credentials.key }}"
{{- end }}
{{- if $tls.secret }}
{{- if $tls.ca }}
nats_ca = "/etc/kvscope/tls/{{ $tls.ca }}"
{{- end }}
{{- if $tls.cert }}
nats_cert = "/etc/kvscope/tls/{{ $tls.cert }}"
nats_key = "/etc/kvscope/tls/{{ $tls.key }}"
{{- end }}
{{- end }}
{{- end }}

{{- define "kvscope.busMounts" -}}
{{- if .Values.bus.enabled -}}
{{- if .Values.bus.credentials.secret }}
- {name: nats-credentials, mountPath: /etc/kvscope/credentials, readOnly: true}
{{- end }}
{{- if (include "kvscope.busTls" . | fromJson).secret }}
- {name: nats-tls, mountPath: /etc/kvscope/tls, readOnly: true}
{{- end }}
{{- end }}
{{- end }}

{{- define "kvscope.busVolumes" -}}
{{- if .Values.bus.enabled -}}
{{- with .Values.bus.credentials.secret }}
- name: nats-credentials
  secret: {secretName: {{ . | quote }}, defaultMode: 0440}
{{- end }}
{{- with (include "kvscope.busTls" . | fromJson).secret }}
- name: nats-tls
  secret: {secretName: {{ . | quote }}, defaultMode: 0440}
{{- end }}
{{- end }}
{{- end }}
